"""The documents say what is true: commands that the command line takes, snippets that import, tables in step.

``python tests/test_docs.py --write`` renews what is generated: docs/settings.md, and the parts of other
documents between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this file's folder, in which Metaflow would find its extensions' tests

from benchmarks import examples, support_table  # noqa: E402
from checklist.__main__ import app as checklist_command  # noqa: E402
from checklist.checks import CHECKS  # noqa: E402
from checklist.judges import thresholds  # noqa: E402
from checklist.measurements import PHASES  # noqa: E402
from checklist.options import Options, build  # noqa: E402
from estimator import models  # noqa: E402
from estimator.cli.app import app as finetune  # noqa: E402
from estimator.cli.app import load  # noqa: E402
from estimator.errors import UserError  # noqa: E402
from estimator.models import untried  # noqa: E402
from flows import finetune_launch  # noqa: E402
from flows.commands import RUNS, flow_words  # noqa: E402
from launchers import engines, settings  # noqa: E402
from launchers.dataset import preferences, rows  # noqa: E402
from launchers.models import weights  # noqa: E402
from tests import image_plans, measured_runs, record_reference  # noqa: E402
from tests.conftest import write_images, write_pairs  # noqa: E402
from tests.flows.conftest import FLOW, environment  # noqa: E402
from tests.warm_python import WarmPython  # noqa: E402

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
DOCUMENTS += [ROOT / "CODE_OF_CONDUCT.md"]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
SETUP = "python3 -m venv .venv && .venv/bin/pip install -q -e '{extra}' && .venv/bin/python {what}"
RUN_COMMAND = SETUP.format(extra=".[train]", what="flows/finetune_flow.py run")
TEST_COMMAND = SETUP.format(extra=".[dev]", what="-m pytest")
WIDTH = 110  # of a line of text
HOSTS = {"arxiv.org", "docs.metaflow.org", "huggingface.co", "keepachangelog.com", "semver.org"}
HOSTS |= {"github.com", "helm.ngc.nvidia.com", "nvidia.github.io"}  # manifests and charts at a fixed version
HOSTS |= {"ui.perfetto.dev", "pytorch.org"}  # viewers of traces
HOSTS |= {"ACCOUNT.blob.core.windows.net"}  # the reader's own
FLAGS_WITHOUT_VALUE = {
    "--adapter-only",
    "--plan-only",
    "--no-preflight",
    "--help",
    "--only-json",
    "--ignore-checklist",
    "--webhook",
    "--taint",
    "--spot",
}
# Lines of other programs, which can't be looked up in this code.
FOREIGN_LINES = ("The @kubernetes decorator requires", "OutOfMemoryError: CUDA out of memory")

# ---------------------------------------------------------------------------------------------------------
# What is generated


def settings_page() -> str:
    """docs/settings.md."""
    flags = {name: "--" + flag.replace("_", "-") for flag, name in finetune_launch.FLAGS.items()}
    lines = [
        "# Settings",
        "",
        "Generated from `launchers/settings.py`; `launchers/settings.schema.json` is the same for editors.",
        "",
        "Every setting can be given in a YAML file, many by a flag, each by `--set`. A flag wins over the",
        "file, `--set` over both; what was used is the artifact `used_settings` and lies beside the model as",
        "`settings.yaml`.",
        "",
        "```bash",
        "finetune run --config settings my.yaml --lr 1e-5 --set lora.rank=16",
        "```",
        "",
        "```yaml",
        "# my.yaml",
        "model: llama-3.2-1b",
        "method: lora",
        "seq_len: 1024",
        "optimizer:",
        "  weight_decay: 0.01",
        "```",
        "",
        "An empty value is written `--set clip_grad_norm=`, a list `--set 'lora.targets=[q_proj, v_proj]'`,",
        "a mapping `--set 'engine_options={log_every_n_steps: 10}'`; the flag `--tracker` takes",
        "`tensorboard,wandb`. With torchtune, keys of `engine_options` that follow from the plan are",
        "refused: the accounting of a run depends on them.",
        "",
    ]
    header = ["| Setting | Flag | Default | Takes | |", "|---|---|---|---|---|"]
    schema = settings.json_schema()
    sections: dict[str, list[str]] = {}
    for name in settings.dotted_names():
        section = name.rpartition(".")[0]
        values = _schema_of(schema, name)
        cells = (f"`{name}`", f"`{flags[name]}`" if name in flags else "", _default(values), _takes(values))
        text = settings.help_of(name).replace("|", "\\|")
        sections.setdefault(section, []).append(f"| {' | '.join(cells)} | {text} |")
    for section, table in sections.items():
        if section:
            lines += ["", f"## {section}", "", settings.help_of(section), ""]
        lines += [*header, *table]
    return "\n".join([*lines, ""])


def _schema_of(schema: dict[str, Any], name: str) -> dict[str, Any]:
    values: dict[str, Any] = schema
    for part in name.split("."):
        values = values["properties"][part]
        if "$ref" in values:
            values = schema["$defs"][values["$ref"].rpartition("/")[2]]
    return values


def _default(values: dict[str, Any]) -> str:
    default = values.get("default", {})
    if default in (None, [], {}):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _takes(values: dict[str, Any]) -> str:
    if "anyOf" in values:
        return " or ".join(text for option in values["anyOf"] if (text := _takes(option)))
    if "enum" in values:
        return ", ".join(f"`{value}`" for value in values["enum"])
    if "const" in values:
        return f"`{values['const']}`"
    kind = values.get("type")
    if kind == "array":
        if "prefixItems" in values:
            return f"{len(values['prefixItems'])} numbers"
        return f"list of {_takes(values['items'])}"
    words = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    text = words.get(str(kind), "mapping" if kind == "object" else "")
    return " ".join([text, *(f"{word} {values[key]:g}" for key, word in limits.items() if key in values)])


def plan_block() -> str:
    """The plan that README.md shows."""
    return "```text\n" + planned({"model": "llama-8b", "method": "lora"}, "kubernetes").strip() + "\n```"


def models_table() -> str:
    lines = ["| Name | Hugging Face id | Parameters | Longest sequence | |", "|---|---|---|---|---|"]
    for name in models.names():
        spec = models.find(name)
        size = (
            f"{spec.parameters / 1e9:.1f} B" if spec.parameters >= 1e8 else f"{spec.parameters / 1e6:.1f} M"
        )
        notes = [] if runs_somewhere(name) else ["planning only"]
        notes += ["asks for a token"] if spec.gated else []
        cells = (f"`{name}`", spec.hf_id or "", size, f"{spec.max_seq_len:,}", ", ".join(notes))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


ANSWERING = [name for name in engines.ENGINES if name != "trl"]  # which learns task grpo alone
COMBINATIONS = [(engine, method) for engine in ANSWERING for method in ("full", "lora", "qlora")]
# What runs where is one column for engines that run the same loop and refuse the same
COLUMNS = [
    (group, method)
    for group in (("torchtune",), ("deepspeed", "fsdp2"))
    for method in ("full", "lora", "qlora")
]


def refusal(model: str, engine: str, method: str) -> str | None:
    """Why this engine refuses, at otherwise default settings."""
    wanted = settings.build({"model": model, "method": method, "engine": engine})
    return engines.get(engine).unsupported(wanted, models.find(model))


def refusal_of_column(model: str, group: tuple[str, ...], method: str) -> str | None:
    """Why the engines of a column refuse; they have to agree whether they do."""
    reasons = [refusal(model, engine, method) for engine in group]
    assert len({reason is None for reason in reasons}) == 1, f"{group} disagree on {model} {method}"
    return reasons[0]


def runs_somewhere(model: str) -> bool:
    """Whether any engine trains it, by any method; the others are known to the estimator alone."""
    return any(refusal(model, *combination) is None for combination in COMBINATIONS)


def proofs() -> str:
    """Every family that the loop was seen to train, from benchmarks/results/support.csv."""
    rows = [row for row in support_table.read() if row.part == "families"]
    heads = [(engine, method) for engine in ("deepspeed", "fsdp2") for method in ("full", "lora", "packing")]
    found = {(row.family, row.engine, row.method): row.result for row in rows}
    lines = [f"| Family | {' | '.join(f'{engine} {method}' for engine, method in heads)} |"]
    lines.append("|---" * (len(heads) + 1) + "|")
    clauses: dict[str, str] = {}
    for family in dict.fromkeys(row.family for row in rows):
        cells = [found[family, engine, method] for engine, method in heads]
        shown = ["yes" if cell == support_table.RUNS else "no" for cell in cells]
        clauses |= {cell: family for cell in cells if cell != support_table.RUNS}
        lines.append(f"| `{family}` | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(textwrap.fill(f"- {clause}.", WIDTH) for clause in clauses)])


def proved_methods() -> str:
    """What each engine was seen to do with tiny-llama, from benchmarks/results/support.csv."""
    rows = [row for row in support_table.read() if row.part == "methods"]
    return _proved("Method", {(row.method, row.engine, row.nodes): row.result for row in rows})


def proved_tasks() -> str:
    """The same of all tasks, each by some methods; SFT's rows are those of the methods."""
    rows = support_table.read()
    methods = [row.method for row in rows if row.part == "tasks"]
    answering = [row for row in rows if row.engine != "trl" and row.method in methods]
    tables = []
    for engines_of, chosen in (
        (ANSWERING, [row for row in answering if row.part in ("methods", "tasks")]),
        (["trl"], [row for row in rows if row.engine == "trl" and row.part == "tasks"]),
    ):
        found = {(f"{row.task} {row.method}", row.engine, row.nodes): row.result for row in chosen}
        tables.append(_proved("Task", found, engines_of))
    return "\n\n".join(tables)


def _proved(title: str, found: dict[tuple[str, str, int], str], names: list[str] = ANSWERING) -> str:
    """A table of (name, engine, nodes) -> result of the engines with these names, and the reasons below."""
    heads = [(engine, nodes) for engine in names for nodes in (1, 2)]
    titles = [f"{engine}, {nodes} node{'s' * (nodes > 1)}" for engine, nodes in heads]
    lines = [f"| {title} | {' | '.join(titles)} |", "|---" * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(name for name, _, _ in found):
        cells = [found[name, engine, nodes] for engine, nodes in heads]
        shown = ["yes" if cell == support_table.RUNS else "no" for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    clauses = dict.fromkeys(result for result in found.values() if result != support_table.RUNS)
    return "\n".join([*lines, "", *(textwrap.fill(f"- {clause}.", WIDTH) for clause in clauses)])


def matrix() -> str:
    """Every model of the table that an engine trains, by what each engine says."""
    head = " | ".join(f"{', '.join(group)} {method}" for group, method in COLUMNS)
    lines = [f"| Model | {head} | Refused, because |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name in filter(runs_somewhere, models.names()):
        reasons = [refusal_of_column(name, *column) for column in COLUMNS]
        cells = ["no" if reason else "yes" for reason in reasons]
        clauses = dict.fromkeys(reason for reason in reasons if reason)
        lines.append(f"| `{name}` | {' | '.join(cells)} | {'; '.join(clauses)} |")
    lines += ["", "No engine trains these; `finetune plan` plans for them.", ""]
    lines += ["| Models | Because |", "|---|---|"]
    others: dict[str, list[str]] = {}
    for name in models.names():
        if not runs_somewhere(name):
            clause = refusal(name, "deepspeed", "full") or ""
            others.setdefault(clause.replace(name, "it"), []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {clause} |" for clause, names in others.items()]
    return "\n".join(lines)


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """Each of them once: a, b and c."""
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def planned_families() -> str:
    """The sentence of docs/models.md about which config.json is understood."""
    rows = support_table.read()
    trained = dict.fromkeys(row.family for row in rows if row.part == "families")
    others = [family for family in models.FAMILIES if family not in trained]
    sentence = (
        "Any other model of text alone whose `config.json` has the `model_type` "
        f"{listed(trained, 'or')} works by its Hugging Face id, as a folder or from S3, in 16 or 32 bits. "
        f"{listed(others)} can be planned for, not trained."
    )
    more = (
        f"The {len(untried.classes())} other causal models of transformers 5.4 "
        "([their names](../estimator/data/untried_families.csv)) run too where `config.json` has the usual "
        "fields: nobody here has tried them, their plan says so, and its memory and speed are those of a "
        "Llama of these widths. Packing is refused for them: nobody has looked whether documents see each "
        "other."
    )
    return "\n\n".join(textwrap.fill(text, WIDTH) for text in (sentence, more))


def errors_of_the_estimator() -> str:
    """The sentence of docs/estimator.md on both fits, from their committed scores."""
    results = ROOT / "benchmarks" / "results"
    memory = json.loads((results / "estimator_fit.json").read_text())
    speed = json.loads((results / "throughput_fit.json").read_text())["all"]
    fitted, apart = memory["in_sample"]["all"], memory["held_out_by_source"]["all"]
    told, untold = speed["fitted"], speed["source held out"]

    def score(values: dict[str, float]) -> str:
        return (
            f"the median error is {values['median_abs_error']:.1%}, 95 % are within "
            f"{values['p95_abs_error']:.0%}, and the upper end covers {values['upper_covers']:.0%}"
        )

    judged = memory["verdict"]["in_sample"]
    sentences = (
        f"Of {judged['ran']} published runs that ran, {judged['refused_of_ran']} are called impossible; of "
        f"{judged['oom']} that ran out of memory, {judged['accepted_of_oom']} are said to fit.",
        f"On {fitted['rows']} published memory peaks, those whose configuration is stated precisely, "
        f"{score(fitted)}; with a run's whole source left out of the fit {score(apart)}.",
        f"On {told['rows']} published speeds the median error is {told['median_abs_error']:.1%}; with the "
        f"source left out {untold['median_abs_error']:.1%}, on the {untold['rows']} that are predicted then.",
    )
    return textwrap.fill(" ".join(sentences), WIDTH)


def checks_table() -> str:
    """All checks, by phase."""
    lines = ["| Phase | Check | Tells |", "|---|---|---|"]
    for phase in (*PHASES, None):
        found = [check for check in CHECKS.values() if check.phase == phase]
        for number, check in enumerate(found):
            lines.append(f"| {(phase or 'all') if not number else ''} | `{check.name}` | {check.tells} |")
    return "\n".join(lines)


GENERATED = {
    "checks": ("docs/checklist.md", checks_table),
    "plan": ("README.md", plan_block),
    "measured": ("docs/estimator.md", measured_runs.table),
    "errors": ("docs/estimator.md", errors_of_the_estimator),
    "models": ("docs/models.md", models_table),
    "families": ("docs/models.md", planned_families),
    "matrix": ("docs/methods.md", matrix),
    "methods": ("docs/methods.md", proved_methods),
    "tasks": ("docs/tasks.md", proved_tasks),
    "proofs": ("docs/methods.md", proofs),
    "images": ("docs/images.md", image_plans.table),
    "records": ("docs/artifacts.md", record_reference.tables),
}


def with_generated(name: str, text: str) -> str:
    """A document's text with its generated part renewed."""
    part = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    content = GENERATED[name][1]()
    renewed, count = part.subn(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
    assert count == 1, f"{GENERATED[name][0]} has no part for {name}"
    return renewed


def write() -> None:
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    for name, (file, _) in GENERATED.items():
        path = ROOT / file
        path.write_text(with_generated(name, path.read_text()))


# ---------------------------------------------------------------------------------------------------------
# What the documents hold


class Block(NamedTuple):
    where: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            line = path.read_text()[: match.start()].count("\n") + 2
            found.append(Block(f"{path.relative_to(ROOT)}:{line}", match[1], match[2]))
    return [block for block in found if not languages or block.language in languages]


def shell_lines() -> list[tuple[str, str]]:
    """(where, command) of all shell blocks, and of the flow's commands in tables and sentences."""
    found = [
        (block.where, line)
        for block in blocks("bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        inline = re.findall(
            r"`(python -m checklist [^`]*|finetune (?:run|check|flow) [^`]+|finetune [a-z]+ -[^`]*)`", prose
        )
        found += [(str(path.relative_to(ROOT)), command) for command in inline]
    return found


def flow_commands(file: str) -> list[tuple[str, list[str]]]:
    """(where, words that the flow gets), by ``finetune run``, ``check`` or ``flow``, or by its file."""
    found = []
    for where, line in shell_lines():
        for part in line.split("&&"):
            program, *words = shlex.split(part.partition(" >")[0])
            started: tuple[str, list[str]] | None = None
            if program.endswith("finetune") and words[0] in (*RUNS, "flow"):
                started = flow_words(words[0], words[1:])
            elif program.endswith("python") and words[0].startswith("flows/"):
                started = Path(words[0]).name, words[1:]
            if started is not None and started[0] == file:
                found.append((where, started[1]))
    return found


def estimator_commands() -> list[tuple[str, list[str]]]:
    """(where, words after finetune), but for those of two pages whose own tests run them."""
    elsewhere = ("docs/command-line.md", "docs/hardware.md")
    found = []
    for where, line in shell_lines():
        words = shlex.split(line.partition(" >")[0])
        ours = words[0].removeprefix(".venv/bin/") == "finetune" and words[1] not in (*RUNS, "flow")
        if ours and not where.startswith(elsewhere):
            found.append((where, words[1:]))
    return found


EARLIER = """
from metaflow import Config, FlowSpec, step

class {name}(FlowSpec):
    settings = Config("settings", default_value={values!r})

    @step
    def start(self):
        self.next(self.end)

    @step
    def end(self):
        pass

{name}()
"""


HelpText = Callable[..., str]


@pytest.fixture(scope="module")
def help_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelpText]:
    """``help_text("card", "view", flow=FLOW)``: the help of a flow's command."""
    home = tmp_path_factory.mktemp("help")
    variables = environment(home)
    with WarmPython("flows.finetune_nodes", environment=variables, folder=home) as warm:

        @cache
        def of(*words: str, flow: Path = FLOW) -> str:
            if words == ("resume",):  # Metaflow looks for the run to go on from before it gives any help
                name = re.findall(r"^class (\w+Flow)\(", flow.read_text(), re.MULTILINE)[0]
                earlier = home / f"{name}.py"
                earlier.write_text(EARLIER.format(name=name, values=json.dumps(settings.parse_yaml(""))))
                run([str(earlier), "run"])
            return run([str(flow), *words, "--help"])

        def run(words: list[str]) -> str:
            done = warm.run(words, folder=home, environment=variables)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield of


def planned(parameters: dict[str, Any], backend: str) -> str:
    """What ``--plan-only`` prints for these parameters."""
    values = {"settings": settings.parse_yaml(""), **parameters, "plan_only": True, "no_calibration": True}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        finetune_launch.plan_from_parameters(values, backend)  # type: ignore[arg-type]
    return output.getvalue()


def parse(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Subcommands and arguments, and the options with their values."""
    plain, options = [], dict[str, list[str]]()
    waiting = iter(words)
    for word in waiting:
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, _, value = word.partition("=")
        taken = 2 if name == "--config" else 0 if name in FLAGS_WITHOUT_VALUE else 1
        values = [value] if value else [next(waiting) for _ in range(taken)]
        options.setdefault(name, []).extend(values)
    return plain, options


# ---------------------------------------------------------------------------------------------------------
# Tests


def test_generated_parts_are_in_step() -> None:
    stale = [name for name, (file, _) in GENERATED.items() if not in_step(name, (ROOT / file).read_text())]
    stale += ["settings"] * ((ROOT / "docs" / "settings.md").read_text() != settings_page())
    assert stale == [], "python tests/test_docs.py --write"


def in_step(name: str, text: str) -> bool:
    return text == with_generated(name, text)


def test_the_two_commands_are_as_promised_and_ci_runs_the_second() -> None:
    readme = [line for where, line in shell_lines() if where.startswith("README")]
    assert readme[:2] == [RUN_COMMAND, TEST_COMMAND]
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents' commands name; S3 and the Hub are not asked."""
    row = json.dumps({"prompt": "1 and 1", "completion": "2"}) + "\n"
    for name in ("my-data.jsonl", "held-out.jsonl", "reviews.jsonl"):
        (tmp_path / name).write_text(row * 100)
    write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "book.txt").write_text("Once upon a time there was a harbour. " * 1000)
    (tmp_path / "papers.jsonl").write_text(json.dumps({"text": "Once upon a time."}) + "\n")
    for path in (examples.FOLDER / "data").iterdir():
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).write_text(path.read_text() * 100)
    write_images(tmp_path / "my-images")
    (tmp_path / "my.yaml").write_text(next(text for text in yaml_examples() if text.startswith("# my.yaml")))
    task = next(block.text for block in blocks("text") if block.text.startswith("task: "))
    (tmp_path / "arith.yaml").write_text(task)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    weights.fetch(models.locate("tiny-llama"), tmp_path / "my-model")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_every_flow_command_is_one_that_the_command_line_takes(place: Path, help_text: HelpText) -> None:
    commands = flow_commands("finetune_flow.py")
    assert len(commands) > 30
    for where, words in commands:
        plain, options = parse(words)
        known = help_text(*subcommand_of(plain)) + help_text()
        for option in options:
            assert re.search(rf"{option}\b", known), f"{where}: {plain} has no {option}"
        if plain[:1] == ["run"]:
            check_run(where, options, place)


def subcommand_of(plain: list[str]) -> list[str]:
    return plain[:2] if plain[0:1] in (["card"], ["logs"]) else plain[:1]


def check_run(where: str, options: dict[str, list[str]], place: Path) -> None:
    """It can be planned, or is refused only because this machine is too small for it."""
    backends = [name for word in options.get("--with", []) if (name := word.split(":")[0]) != "secrets"]
    assert set(backends) <= {"kubernetes", "batch"}, where
    parameters: dict[str, Any] = {
        name: (options["--" + name.replace("_", "-")] or [True])[-1]
        for name in finetune_launch.FLAGS
        if "--" + name.replace("_", "-") in options
    }
    parameters["overrides"] = tuple(options.get("--set", ()))
    if "--config" in options:
        parameters["settings"] = settings.parse_yaml((place / options["--config"][1]).read_text())
    try:
        answer = planned(parameters, backends[0] if backends else "local")
    except UserError as error:
        answer = str(error)
    assert answer.startswith("Plan: ") or "These would work:" in answer, f"{where}: {answer}"


def test_every_command_of_the_estimator_is_one_that_the_command_line_takes(place: Path) -> None:
    for where, (name, *words) in estimator_commands():
        with contextlib.suppress(typer.Exit):  # --help
            assert not load(name).make_context(name, words).args, where


@pytest.mark.slow
@pytest.mark.nightly
def test_every_command_of_the_estimator_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that name a cluster or a file of the reader's are only read; they end with one clear line."""
    commands = {tuple(words): where for where, words in estimator_commands()}
    assert len(commands) > 10
    monkeypatch.chdir(place)
    monkeypatch.setenv("KUBECONFIG", str(place / "none"))
    for words, where in commands.items():
        done = CliRunner().invoke(finetune, words, prog_name="finetune")
        said = f"{where}: finetune {shlex.join(words)}: {done.output}"
        theirs = {"--from-cluster", "--hardware", "--gpu"} & set(words) or "NAME" in words
        theirs = theirs or words[0] in ("runs", "costs")  # there are none here
        assert done.exit_code in ((0, 1, 2) if theirs else (0,)), said
        assert done.exception is None or isinstance(done.exception, SystemExit), said


def checklist_commands() -> list[tuple[str, list[str]]]:
    """(where, words after checklist): of ``python -m checklist``, and of launchers that start it."""
    found = []
    for where, line in shell_lines():
        before, separator, after = line.partition("-m checklist")
        starts = re.fullmatch(r"\S*(python|torchrun|srun) .*", before.strip() + " ")
        if separator and starts and "--help" not in after:
            found.append((where, shlex.split(after)))
    return found


def test_every_checklist_command_is_one_that_the_command_line_takes(place: Path) -> None:
    command = typer.main.get_command(checklist_command)
    assert len(checklist_commands()) > 5
    for where, words in checklist_commands():
        context = command.make_context("checklist", words)
        values = context.params
        build(Options, {name: values.get(name) for name in ("profile", "only", "skip")})
        assert not context.args, where
    (example,) = (block for block in blocks("csv") if block.where.startswith("docs/checklist.md"))
    (place / "own.csv").write_text(example.text)
    assert len(thresholds.read(place / "own.csv", own=True)) == 2


@pytest.mark.parametrize(("file", "least"), [("checklist_flow.py", 5), ("rejection_flow.py", 3)])
def test_every_command_of_the_other_flows_has_its_options(help_text: HelpText, file: str, least: int) -> None:
    flow = FLOW.with_name(file)
    found = flow_commands(flow.name)
    assert len(found) >= least
    for line, words in found:
        plain, options = parse(words)
        known = help_text(*subcommand_of(plain), flow=flow) + help_text(flow=flow)
        for option in options:
            assert re.search(rf"{option}\b", known), f"{line}: there is no {option}"


def test_the_checklist_commands_of_the_readme_are_those_that_other_tests_run() -> None:
    """tests/flows/test_commands.py runs the first, tests/checklist/test_main.py the second."""
    lines = [line for where, line in shell_lines() if where.startswith("README") and "check" in line]
    assert lines == ["finetune check", "python -m checklist --json result.json"]


def test_other_shell_lines_are_of_known_programs() -> None:
    programs = r"torchrun|srun|python3|pip|python|finetune|source|export|git|aws|ruff|mypy|\.venv/bin/[\w-]+"
    programs += r"|kubectl|helm|eksctl|terraform|docker|gcloud|az|cd|cp|eval"
    known = rf"(FINETUNE_\w+=\S+ )?({programs}) "
    for where, line in shell_lines():
        for part in line.split("&&"):
            assert re.match(known, part.strip() + " "), f"{where}: {line}"


def test_plan_only_needs_nothing_that_trains(tmp_path: Path) -> None:
    """README: planning works with the small install. Its packages are those that pyproject.toml asks for."""
    code = (
        "import runpy, sys\n"
        "for name in 'torch torchtune torchao torchdata transformers tokenizers safetensors huggingface_hub "
        "datasets peft accelerate deepspeed pandas'.split():\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = [{str(FLOW)!r}, 'run', '--plan-only']\n"
        f"runpy.run_path({str(FLOW)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Plan: tiny-llama" in done.stdout


def test_the_table_of_what_runs_where_is_what_the_engines_say() -> None:
    text = (ROOT / "docs" / "methods.md").read_text().partition("## What was seen")[0]
    seen: list[str] = []
    for line in re.findall(r"^\| `.*\| (?:yes|no).*\|$", text, re.MULTILINE):
        patterns, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in filter(runs_somewhere, models.names()):
            if any(fnmatch(name, pattern) for pattern in re.findall(r"`([^`]+)`", patterns)):
                seen.append(name)
                for column, cell in zip(COLUMNS, cells, strict=True):
                    says = refusal_of_column(name, *column) is None
                    assert says == cell.startswith("yes"), f"{name} {column}: the table says {cell}"
    assert sorted(seen) == sorted(filter(runs_somewhere, models.names()))


def test_python_snippets_compile_and_their_imports_are_there() -> None:
    assert blocks("python")
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text, block.where)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module != "transformers":
                module = import_module(node.module)
                for alias in node.names:
                    here = hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}") is not None
                    assert here, f"{block.where}: {node.module} has no {alias.name}"


def yaml_examples() -> list[str]:
    return [block.text for block in blocks("yaml")]


def test_yaml_examples_are_settings() -> None:
    assert yaml_examples()
    for text in yaml_examples():
        settings.parse_yaml(text)


@pytest.mark.parametrize("path", examples.FILES, ids=lambda path: path.name)
def test_an_example_is_planned_and_listed_with_its_plan(path: Path) -> None:
    made = examples.plan(path)
    assert made.planned_only is None
    assert made.prediction.memory.fits
    assert examples.row(path, made) in examples.README.read_text(), "python -m benchmarks.examples"
    _, command, *_ = path.read_text().splitlines()
    assert f"examples/{path.name}" in command


def test_the_examples_table_has_no_other_rows() -> None:
    assert examples.README.read_text().count(".yaml)") == len(examples.FILES) + 1  # and the checklist's


def test_the_example_of_a_score_prefers_few_words() -> None:
    module = runpy.run_path(str(ROOT / "examples" / "short_answers.py"))
    score = module["short_answers"]
    assert score("q?", "two words") > score("q?", "now three words") > score("q?", "q?") == score("q?", " ")


def test_data_examples_are_datasets(tmp_path: Path) -> None:
    examples = blocks("jsonl")
    assert len(examples) == 7
    for block in examples:
        path = tmp_path / "example.jsonl"
        path.write_text(block.text)
        if not block.where.startswith("docs/tasks.md"):
            assert list(rows.read(path))
        elif '"rejected"' in block.text:
            assert list(preferences.read(path))
        else:
            assert list(preferences.read_judged(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            assert target.split("/")[2] in HOSTS, target
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{path.name}: {target}"


def test_error_lines_are_those_of_the_code() -> None:
    """The longest stretch of each line that has no value in it stands in the code."""
    sources = [path for room in ROOM_ARROWS for path in (ROOT / room).rglob("*.py")]
    code = " ".join(path.read_text() for path in sources)
    code = re.sub(r"""["']\s*f?["']""", "", " ".join(code.split()))
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Odd")[0]
    lines = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(lines) > 30
    for line in lines:
        if not line.startswith(FOREIGN_LINES):
            stretches = re.split(r"\b[A-Z_]{2,}\b|\b[MNXY]\b|\.\.\.|\d+(?:\.\d+)?|[()/:`]", line)
            longest = max((stretch.strip(" :,;") for stretch in stretches), key=len)
            assert longest in code, f"{line}: nothing says {longest!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_of_the_machine_it_was_written_on(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"/(work|root|home|tmp|opt|Users)/|TODO|FIXME|#\d+\b", text)
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\s)`]+", text)} <= HOSTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_of_text_are_no_longer_than_those_of_code(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in prose.splitlines() if len(line) > WIDTH and not line.startswith("|")]
    assert long == []


ROOM_ARROWS = {
    "estimator": set[str](),
    "launchers": {"estimator"},
    "checklist": {"estimator", "launchers"},
    "decorators": {"estimator", "launchers"},
    "flows": {"checklist", "estimator", "launchers", "decorators"},
    "metaflow_extensions": {"decorators", "estimator"},
}


def test_the_arrows_of_the_map_are_those_of_the_imports() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room, allowed in ROOM_ARROWS.items():
        found = set()
        for path in (ROOT / room).rglob("*.py"):
            found |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        used = found & (ROOM_ARROWS.keys() | {"benchmarks", "tests"}) - {room}
        assert used == allowed
        arrow = f"{room} -> {', '.join(sorted(used)) or 'nothing'}"
        assert arrow in text, f"CONTRIBUTING.md: {arrow}"


def test_of_the_launchers_the_checklist_imports_what_both_share_and_nothing_else() -> None:
    taken = set()
    for path in (ROOT / "checklist").rglob("*.py"):
        taken |= set(re.findall(r"^\s*(?:from|import) (launchers[\w.]*)", path.read_text(), re.MULTILINE))
    assert {name for name in taken if not name.startswith("launchers.cluster")} == set()


def test_the_map_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(
        r"`((?:estimator|launchers|decorators|checklist|flows|benchmarks|tests|docs)/[\w./-]+)`", text
    ):
        assert (ROOT / name).exists(), name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_docs.py --write")
    write()
