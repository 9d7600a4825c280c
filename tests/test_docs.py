"""Documents are correct: commands are valid, snippets import, generated tables are up to date.

``python -m benchmarks.documents`` renews what is generated.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import examples
from benchmarks.documents import GENERATED, planned, settings_page, with_generated
from checklist.__main__ import app as checklist_command
from checklist.judging import thresholds
from checklist.options import Options, build
from decorators.arguments import INFERENCE_ARGUMENTS, OWN_ARGUMENTS, SIZE_ARGUMENTS, Role
from estimator import models
from estimator.cli.app import app as finetune
from estimator.cli.app import load
from estimator.errors import UserError
from flows.commands.flow_commands import RUNS, flow_arguments
from flows.finetune import flags
from flows.finetune.parameters import read_settings
from launchers import settings
from launchers.dataset import preferences, rows
from launchers.models import weights
from launchers.settings.options import setting_options, translate
from tests.conftest import write_images, write_pairs
from tests.flows.conftest import FLOW, environment
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
DOCUMENTS += [ROOT / "CODE_OF_CONDUCT.md"]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
SETUP = "python3 -m venv .venv && .venv/bin/pip install -q -e '{extra}' && .venv/bin/python {what}"
RUN_COMMAND = SETUP.format(extra=".[train]", what="flows/finetune_flow.py run")
TEST_COMMAND = SETUP.format(extra=".[dev]", what="-m pytest")
HOSTS = {"arxiv.org", "docs.metaflow.org", "huggingface.co", "keepachangelog.com", "semver.org"}
HOSTS |= {"github.com", "raw.githubusercontent.com"}  # manifests and charts at a fixed version
HOSTS |= {"helm.ngc.nvidia.com", "nvidia.github.io", "aws.github.io"}
HOSTS |= {"ui.perfetto.dev", "pytorch.org"}  # viewers of traces
HOSTS |= {"ACCOUNT.blob.core.windows.net", "127.0.0.1:8000"}  # the reader's own
HOSTS |= {"HOST:9091", "127.0.0.1:8080", "pushgateway.finetune:9091", "metadata-service.metaflow:8080"}
FLAGS_WITHOUT_VALUE = {
    "--adapter-only",
    "--plan-only",
    "--no-preflight",
    "--help",
    "--help-all",
    "--only-json",
    "--ignore-checklist",
    "--webhook",
    "--taint",
    "--spot",
}

# ---------------------------------------------------------------------------------------------------------
# What the documents hold


class Block(NamedTuple):
    where: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found_blocks = []
    for path in DOCUMENTS:
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
            line = path.read_text()[: match.start()].count("\n") + 2
            found_blocks.append(Block(f"{path.relative_to(ROOT)}:{line}", match[1], match[2]))
    return [block for block in found_blocks if not languages or block.language in languages]


def shell_lines() -> list[tuple[str, str]]:
    """Return (where, command) of all shell blocks, and of flow commands in tables and sentences."""
    lines_of_blocks = [
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
        lines_of_blocks += [(str(path.relative_to(ROOT)), command) for command in inline]
    return lines_of_blocks


def flow_commands(file: str) -> list[tuple[str, list[str]]]:
    """Return (where, arguments of the flow) of ``finetune run``, ``check``, ``flow`` and flow files."""
    commands = []
    for location, line in shell_lines():
        for part in line.split("&&"):
            program, *arguments = shlex.split(part.partition(" >")[0])
            started: tuple[str, list[str]] | None = None
            if program.endswith("finetune") and arguments[0] in (*RUNS, "flow"):
                started = flow_arguments(arguments[0], arguments[1:])
            elif program.endswith("python") and arguments[0].startswith("flows/"):
                started = Path(arguments[0]).name, arguments[1:]
            if started is not None and started[0] == file:
                commands.append((location, started[1]))
    return commands


def estimator_commands() -> list[tuple[str, list[str]]]:
    """Return (where, arguments of finetune), except for two pages with their own tests."""
    elsewhere = ("docs/estimate.md", "docs/hardware.md")
    commands = []
    for location, line in shell_lines():
        arguments = shlex.split(line.partition(" >")[0])
        ours = arguments[0].removeprefix(".venv/bin/") == "finetune" and arguments[1] not in (*RUNS, "flow")
        if ours and not location.startswith(elsewhere):
            commands.append((location, arguments[1:]))
    return commands


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
    """``help_text("card", "view", flow=FLOW)``: return the help of a command of a flow."""
    home = tmp_path_factory.mktemp("help")
    (home / ".metaflow").mkdir()  # without it, the help of `card` ends with an error
    variables = environment(home)
    with WarmPython("flows.finetune.steps", environment=variables, folder=home) as warm:

        @cache
        def of(*arguments: str, flow: Path = FLOW) -> str:
            if arguments == ("resume",):  # Metaflow looks for the run to resume before it prints any help
                name = re.findall(r"^class (\w+Flow)\(", flow.read_text(), re.MULTILINE)[0]
                earlier = home / f"{name}.py"
                earlier.write_text(EARLIER.format(name=name, values=json.dumps(read_settings(""))))
                run([str(earlier), "run"])
            everything = arguments == ("run",)
            return run([str(flow), *arguments, "--help-all" if everything else "--help"])

        def run(arguments: list[str]) -> str:
            done = warm.run(arguments, folder=home, environment=variables)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield of


def parse(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return subcommands and arguments, and the options with their values."""
    plain, options = [], dict[str, list[str]]()
    waiting = iter(arguments)
    for word in waiting:
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, _, value = word.partition("=")
        takes_value = 2 if name == "--config" else 0 if name in FLAGS_WITHOUT_VALUE else 1
        values = [value] if value else [next(waiting) for _ in range(takes_value)]
        options.setdefault(name, []).extend(values)
    return plain, options


# ---------------------------------------------------------------------------------------------------------
# Tests


def test_the_page_of_gpu_profile_names_every_argument_and_every_value_of_request() -> None:
    page = (ROOT / "docs" / "gpu-profile.md").read_text().partition("## Arguments")[2].partition("\n## ")[0]
    arguments = {f"`{name}=`" for name in (*OWN_ARGUMENTS, *SIZE_ARGUMENTS, *INFERENCE_ARGUMENTS)}
    roles = {f'`"{role}"`' for role in get_args(Role)}
    assert [name for name in sorted(arguments | roles) if name not in page] == []


def test_generated_parts_are_up_to_date() -> None:
    stale = [name for name, (file, _) in GENERATED.items() if not in_step(name, (ROOT / file).read_text())]
    stale += ["settings"] * ((ROOT / "docs" / "settings.md").read_text() != settings_page())
    assert stale == [], "python -m benchmarks.documents"


def in_step(name: str, text: str) -> bool:
    return text == with_generated(name, text)


def test_the_readme_has_its_two_commands_and_ci_runs_the_second() -> None:
    readme = [line for location, line in shell_lines() if location.startswith("README")]
    assert readme[0] == RUN_COMMAND
    assert TEST_COMMAND in readme
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files named in commands of the documents; S3 and the Hub are not queried."""
    row = json.dumps({"prompt": "1 and 1", "completion": "2"}) + "\n"
    for name in ("my-data.jsonl", "held-out.jsonl", "reviews.jsonl"):
        (tmp_path / name).write_text(row * 100)
    write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "book.txt").write_text("Once upon a time there was a harbour. " * 1000)
    (tmp_path / "papers.jsonl").write_text(json.dumps({"text": "Once upon a time."}) + "\n")
    write_images(tmp_path / "my-images")
    (tmp_path / "my.yaml").write_text(next(text for text in yaml_examples() if text.startswith("# my.yaml")))
    task = next(block.text for block in blocks("text") if block.text.startswith("task: "))
    (tmp_path / "arith.yaml").write_text(task)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "converted.yaml").write_text("model: tiny-llama\n")
    weights.fetch(models.locate("tiny-llama"), tmp_path / "my-model")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_every_flow_command_of_the_documents_is_valid(place: Path, help_text: HelpText) -> None:
    commands = flow_commands("finetune_flow.py")
    assert len(commands) > 30
    for location, arguments in commands:
        plain, options = parse(arguments)
        known_options = help_text(*subcommand_of(plain)) + help_text()
        for option in options:
            assert re.search(rf"{option}\b", known_options), f"{location}: {plain} has no {option}"
        if plain[:1] == ["run"]:
            check_run(location, options, place)


def subcommand_of(plain: list[str]) -> list[str]:
    return plain[:2] if plain[0:1] in (["card"], ["logs"]) else plain[:1]


def check_run(location: str, options: dict[str, list[str]], place: Path) -> None:
    """Check that a run can be planned, or is refused only because of this machine or missing downloads."""
    backends = [name for word in options.get("--with", []) if (name := word.split(":")[0]) != "secrets"]
    assert set(backends) <= {"kubernetes", "batch"}, location
    parameters: dict[str, Any] = {
        name: (options["--" + name.replace("_", "-")] or [True])[-1]
        for name in flags.FLAGS
        if "--" + name.replace("_", "-") in options
    }
    names = {f"--{name.replace('_', '-')}" for name in flags.FLAGS}
    example_values = {
        option: options[option][-1] for option in setting_options().keys() & options.keys() - names
    }
    arguments_of_settings = [
        translate([option, value], (), ())[1] for option, value in example_values.items()
    ]
    parameters["overrides"] = (*arguments_of_settings, *options.get("--set", ()))
    if "--config" in options:
        file = place / options["--config"][1]
        parameters["settings"] = settings.parse_yaml(file.read_text(), file.parent)
    try:
        answer = planned(parameters, backends[0] if backends else "local")
    except UserError as error:
        answer = str(error)
    refused = ("Alternatives that fit:", "this machine has no NVIDIA GPU", "is not in the local cache")
    assert answer.startswith("Plan: ") or any(arguments in answer for arguments in refused), (
        f"{location}: {answer}"
    )


def test_every_estimator_command_of_the_documents_is_valid(place: Path) -> None:
    for location, (name, *arguments) in estimator_commands():
        with contextlib.suppress(typer.Exit):  # --help
            assert not load(name).make_context(name, arguments).args, location


@pytest.mark.slow
@pytest.mark.nightly
def test_every_estimator_command_of_the_documents_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that need a cluster or a file of the user end with one clear line."""
    commands = {tuple(arguments): location for location, arguments in estimator_commands()}
    assert len(commands) > 10
    monkeypatch.chdir(place)
    monkeypatch.setenv("KUBECONFIG", str(place / "none"))
    for arguments, location in commands.items():
        done = CliRunner().invoke(finetune, arguments, prog_name="finetune")
        message = f"{location}: finetune {shlex.join(arguments)}: {done.output}"
        theirs = {"--from-cluster", "--hardware", "--gpu"} & set(arguments) or "NAME" in arguments
        theirs = theirs or arguments[0] in (
            "runs",
            "costs",
            "rightsize",
            "chat",
            "serve",
            "convert",
        )  # there are none here
        assert done.exit_code in ((0, 1, 2) if theirs else (0,)), message
        assert done.exception is None or isinstance(done.exception, SystemExit), message


def checklist_commands() -> list[tuple[str, list[str]]]:
    """Return (where, arguments) of ``python -m checklist`` and of launchers that start it."""
    commands = []
    for location, line in shell_lines():
        before, separator, after = line.partition("-m checklist")
        starts = re.fullmatch(r"\S*(python|torchrun|srun) .*", before.strip() + " ")
        if separator and starts and "--help" not in after:
            commands.append((location, shlex.split(after)))
    return commands


def test_every_checklist_command_of_the_documents_is_valid(place: Path) -> None:
    command = typer.main.get_command(checklist_command)
    assert len(checklist_commands()) > 5
    for location, arguments in checklist_commands():
        context = command.make_context("checklist", arguments)
        values = context.params
        build(Options, {name: values.get(name) for name in ("profile", "only", "skip")})
        assert not context.args, location
    (example,) = (block for block in blocks("csv") if block.where.startswith("docs/checklist.md"))
    (place / "own.csv").write_text(example.text)
    assert len(thresholds.read(place / "own.csv", user=True)) == 2


@pytest.mark.parametrize(("file", "least"), [("checklist_flow.py", 5), ("rejection_flow.py", 3)])
def test_every_command_of_the_other_flows_has_valid_options(
    help_text: HelpText, file: str, least: int
) -> None:
    flow = FLOW.with_name(file)
    commands = flow_commands(flow.name)
    assert len(commands) >= least
    for line, arguments in commands:
        plain, options = parse(arguments)
        known_options = help_text(*subcommand_of(plain), flow=flow) + help_text(flow=flow)
        for option in options:
            assert re.search(rf"{option}\b", known_options), f"{line}: there is no {option}"


def test_plan_only_imports_no_training_package(tmp_path: Path) -> None:
    """README: planning works with the minimal installation, the packages required in pyproject.toml."""
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


def test_python_snippets_compile_and_their_imports_exist() -> None:
    assert blocks("python")
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text, block.where)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module != "transformers":
                module = import_module(node.module)
                for alias in node.names:
                    exists = (
                        hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}") is not None
                    )
                    assert exists, f"{block.where}: {node.module} has no {alias.name}"


def yaml_examples() -> list[str]:
    return [block.text for block in blocks("yaml")]


def test_yaml_examples_are_settings() -> None:
    assert yaml_examples()
    for text in yaml_examples():
        settings.parse_yaml(text)


@pytest.mark.parametrize("path", examples.FILES, ids=lambda path: path.name)
def test_an_example_is_planned_and_listed_with_its_plan(path: Path) -> None:
    example_plan = examples.plan(path)
    assert example_plan.planned_only is None
    assert example_plan.prediction.memory.fits
    assert examples.row(path, example_plan) in examples.README.read_text(), "python -m benchmarks.examples"
    _, command, *_ = path.read_text().splitlines()
    assert f"examples/{path.name}" in command


def test_the_example_score_prefers_short_answers() -> None:
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


@pytest.mark.parametrize("page", ["backends.md", "disruptions.md"])
def test_tests_named_on_a_page_exist(page: str) -> None:
    named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/[^)]+)\)", (ROOT / "docs" / page).read_text())
    assert len(named) > 15
    assert [name for name, file in named if f"def {name}(" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_have_existing_targets(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            assert target.split("/")[2] in HOSTS, target
            continue
        file, _, anchor = target.partition("#")
        target_path = (path.parent / file).resolve() if file else path
        assert target_path.exists(), f"{path.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", target_path.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_contain_no_local_path(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"/(work|root|home|tmp|opt|Users)/|TODO|FIXME|#\d+\b", text)
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\s)`]+", text)} <= HOSTS


ROOM_ARROWS = {
    "estimator": set[str](),
    "launchers": {"estimator"},
    "checklist": {"estimator", "launchers"},
    "decorators": {"estimator", "launchers"},
    "flows": {"checklist", "estimator", "launchers", "decorators"},
    "metaflow_extensions": {"decorators", "estimator"},
}


def test_the_arrows_of_the_module_map_match_the_imports() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room, allowed in ROOM_ARROWS.items():
        arrows = set()
        for path in (ROOT / room).rglob("*.py"):
            arrows |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        used = arrows & (ROOM_ARROWS.keys() | {"benchmarks", "tests"}) - {room}
        assert used == allowed
        arrow = f"{room} -> {', '.join(sorted(used)) or 'nothing'}"
        assert arrow in text, f"CONTRIBUTING.md: {arrow}"


def test_the_checklist_imports_only_the_cluster_folder_of_launchers() -> None:
    imported_names = set()
    for path in (ROOT / "checklist").rglob("*.py"):
        imported_names |= set(
            re.findall(r"^\s*(?:from|import) (launchers[\w.]*)", path.read_text(), re.MULTILINE)
        )
    assert {name for name in imported_names if not name.startswith("launchers.cluster")} == set()


def test_files_named_in_the_module_map_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = "estimator|launchers|decorators|checklist|flows|benchmarks|tests|docs"
    named = re.findall(rf"`((?:{packages})/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


# Placeholders of quoted messages: NAME, N, figures, paths, and omissions
_PLACEHOLDER = re.compile(r"\.\.\.|[:;]|\S*\d\S*|\b(?:GPU\(s\)|GiB|[A-Z][A-Z_]*\b)")
_OF_METAFLOW = ("The @kubernetes decorator requires",)


def test_each_step_of_the_documented_data_path_exists() -> None:
    """The table in docs/interfaces.md: at most five steps, and each `Class.field` exists in its (`file`)."""
    section = (ROOT / "docs" / "interfaces.md").read_text().split("## Three values through the packages")[1]
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    stops = re.findall(r"`(\w+)\.(\w+)`[^`|]*\(`([\w/]+)(?:\.py|/)`\)", "\n".join(rows))
    assert len(rows) == 5
    assert len(stops) >= 9
    for holder, field, path in stops:
        record = getattr(import_module(path.replace("/", ".")), holder)
        fields = {name for base in record.__mro__ for name in getattr(base, "__annotations__", {})}
        assert field in fields or hasattr(record, field), f"{path}: {holder}.{field}"


def test_messages_quoted_in_documents_exist_in_the_code() -> None:
    packages = ("checklist", "decorators", "estimator", "flows", "launchers", "metaflow_extensions")
    files = [file.read_text() for package in packages for file in (ROOT / package).rglob("*.py")]
    source = re.sub(r'"\s*\n\s*f?"', "", "".join(files))  # joins the parts of a literal
    rows = [
        line.split("|")[1]
        for page in ("troubleshooting.md", "serve.md")
        for line in (ROOT / "docs" / page).read_text().splitlines()
        if line.startswith("|")
    ]
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    longest = [
        max((phrase.strip(" ,.()") for phrase in _PLACEHOLDER.split(quote)), key=len) for quote in quotes
    ]
    phrases = [phrase for phrase in longest if len(phrase.split()) >= 3 and phrase not in _OF_METAFLOW]
    assert len(phrases) > 40
    assert [phrase for phrase in phrases if phrase not in source] == [], "no code prints these"
