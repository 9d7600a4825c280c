"""finetune fetch: weights, tokenizer and data of a run, for nodes without internet access."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from estimator.cli.common import common
from estimator.terminal import print


def fetch(
    file: Annotated[
        Path | None, Argument(metavar="[FILE]", help="YAML file with settings of the run.")
    ] = None,
    model: Annotated[str | None, common("model", "--model", "-m")] = None,
    dataset: Annotated[str | None, common("dataset")] = None,
    overrides: Annotated[
        list[str] | None,
        Option("--set", help="Any setting by its dotted name, e.g. task=dpo; repeatable."),
    ] = None,
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for the files, which the run's nodes must be able to read.",
        ),
    ] = Path("fetched"),
) -> None:
    """Fetch weights, tokenizer and data of a run where there is internet access, and check them.

    Writes settings.yaml into the folder: the run's settings with the paths of the fetched files.
    """
    import yaml

    from estimator.cli.output import make_output_folder, write_text
    from launchers.run import fetching
    from launchers.settings import build, read_file

    flags = {name: value for name, value in (("model", model), ("dataset", dataset)) if value is not None}
    values = read_file(file) if file is not None else {}
    run_settings = build(values, overrides or (), flags)
    make_output_folder(output)
    fetched = fetching.fetch_inputs(run_settings, output)
    written = output.absolute() / "settings.yaml"
    settings = fetched.model_dump(mode="json", exclude_defaults=True)
    write_text(written, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    if fetched.harness.tasks:
        print("harness.tasks: lm-evaluation-harness fetches their data itself, which needs internet access")
    print(f"next: HF_HUB_OFFLINE=1 finetune run {quote(str(written))}", flush=True)
