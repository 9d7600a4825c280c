"""finetune run, check, flow: the packaged flows from any folder, by Metaflow's own command line of each.

The process is replaced by ``python FLOW.py WORDS...``: what starts, signals and resumes a run is Metaflow's,
and the same as for who runs the files of a clone. Nothing here imports Metaflow but completion, which must.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

DEFAULT = "finetune"
FLOWS = {
    DEFAULT: "finetune_flow.py",
    "linear": "finetune_linear_flow.py",  # one node, for Step Functions
    "rejection": "rejection_flow.py",
    "checklist": "checklist_flow.py",
}
RUNS = {"run": DEFAULT, "check": "checklist"}  # finetune's command -> the flow that it runs
CONFIGS = {"run": "settings", "check": "options"}  # name of the YAML file that each takes first
# Options that Metaflow takes before its command, with the number of their values. A user of `finetune run`
# knows of no such place, so that they may stand anywhere.
BEFORE_COMMAND = {
    "--config": 2,
    "--config-value": 2,
    "--datastore": 1,
    "--datastore-root": 1,
    "--environment": 1,
    "--event-logger": 1,
    "--metadata": 1,
    "--mode": 1,
    "--monitor": 1,
    "--no-pylint": 0,
    "--not-quiet": 0,
    "--package-suffixes": 1,
    "--pylint": 0,
    "--quiet": 0,
}


class FlowCommand(TyperCommand):
    """Hands every word on as it is; completes the options of the flow that it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # --help is answered by the flow, which knows its options
        super().__init__(*args, **{**kwargs, "add_help_option": False})
        self.ignore_unknown_options = self.allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words unread: also ``--``, ``--help`` and values that look like options."""
        ctx.params["words"] = list(args)
        ctx.args = []
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The run's options, for ``finetune run`` and ``finetune check``."""
        if self.name in RUNS:
            names = sorted(_completions(RUNS[self.name]))
            self.params = [TyperOption(param_decls=[name]) for name in names]
        return super().shell_complete(ctx, incomplete)


def _flow_names(incomplete: str) -> list[str]:
    return [name for name in FLOWS if name.startswith(incomplete)]


Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...")]
FlowWords = Annotated[
    list[str] | None, typer.Argument(metavar="[FLOW] [COMMAND] [OPTION]...", autocompletion=_flow_names)
]


def run(words: Words = None) -> None:
    """Fine-tune: plan, train, measure, evaluate, hand over. Takes every option of the flow's run.

    The first word may be a YAML file of settings; options override it: finetune run FILE.yaml --lr 1e-4
    """
    if {"--help", "-h", "--help-all"} & set(words or ()):
        from flows.commands.run_help import help_page

        typer.echo(help_page("finetune run", everything="--help-all" in (words or ())))
        return
    _become(*flow_words("run", words or ()))


def check(words: Words = None) -> None:
    """Test a cluster's nodes and the network between them. Takes every option of the flow's run.

    The first word may be a YAML file of options.
    """
    _become(*flow_words("check", words or ()))


def flow(words: FlowWords = None) -> None:
    """Any command of a flow: resume, card, logs, argo-workflows create.

    The first word may be the flow: finetune (as without it), linear, rejection or checklist.
    """
    _become(*flow_words("flow", words or ()))


def flow_words(command: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """The flow's file, and its words for those behind ``finetune run``, ``check`` or ``flow``."""
    if command in RUNS:
        return FLOWS[RUNS[command]], _run_words(words, CONFIGS[command])
    named = bool(words) and words[0] in FLOWS
    return FLOWS[words[0] if named else DEFAULT], list(words[named:]) or ["--help"]


def _run_words(words: Sequence[str], config: str) -> list[str]:
    """Put the options that Metaflow takes before its command first; a leading YAML file is its ``config``."""
    if words and words[0].endswith((".yaml", ".yml")):
        words = ["--config", config, *words]
    before, after = split_words(words)
    return [*before, "run", *after]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split words into those that Metaflow takes before its command, wherever they are, and the others."""
    before: list[str] = []
    after: list[str] = []
    rest = iter(words)
    for word in rest:
        name, given, _ = word.partition("=")
        if name in BEFORE_COMMAND:
            values = BEFORE_COMMAND[name] - bool(given)
            before += [word, *(value for _, value in zip(range(values), rest, strict=False))]
        else:
            after.append(word)
    return before, after


def config_file(words: Sequence[str], config: str) -> Path:
    """Path given by ``--config CONFIG PATH`` on a flow's command line, or the empty path if none is.

    Metaflow hands a config's parser the file's text alone.
    """
    given = (words[at + 2] for at in range(len(words) - 2) if words[at : at + 2] == ["--config", config])
    return Path(next(given, ""))


def console_script(path: str | None = None) -> str:
    """Return ``finetune`` if PATH (or ``path``) has it, else the path of the script next to this Python."""
    beside = Path(sys.executable).with_name("finetune")
    if shutil.which("finetune", path=path) or not beside.is_file():
        return "finetune"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def command_line(script: str, words: Sequence[str], program: str = "finetune") -> str:
    """Format the ``finetune`` command that does the same as a flow's file with these words."""
    name = next((name for name, file in FLOWS.items() if file == Path(script).name), None)
    if name is None:
        return join(["python", script, *words])  # a copy of a flow, under a name of the user's
    before, rest = split_words(words)
    for command, run_flow in RUNS.items():
        if run_flow == name and rest[:1] == ["run"]:
            return join([program, command, *before, *rest[1:]])
    return join([program, "flow", *([] if name == DEFAULT else [name]), *words])


def _become(file: str, words: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(Path(__file__).parents[1] / file), *words])  # noqa: S606


def _completions(name: str) -> set[str]:
    from decorators._metaflow import run_parameters

    parameters, switches = run_parameters(flow_class(name))
    from flows.commands.run_options import OF_METAFLOW
    from launchers.settings.options import all_options

    own = {*parameters, *switches, *OF_METAFLOW, *BEFORE_COMMAND}
    return own | all_options() if name == DEFAULT else own


def flow_class(name: str) -> Any:
    """The flow of that name in FLOWS, imported."""
    from importlib import import_module

    from metaflow import FlowSpec

    module = import_module(f"flows.{FLOWS[name].removesuffix('.py')}")
    own: list[Any] = [each for each in vars(module).values() if isinstance(each, type)]
    (kind,) = (each for each in own if issubclass(each, FlowSpec) and each.__module__ == module.__name__)
    return kind
