"""Foreign names and messages in printed output do not control the terminal."""

from __future__ import annotations

import ast
import copy
import dataclasses
import logging
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from checklist.outputs import terminal as checklist_terminal
from checklist.verdict import judge
from decorators.backends.findings import Findings
from decorators.card.runs import RunRecord
from estimator import hardware, logs, terminal
from estimator.cli import gpus, models, output
from estimator.costs import Total
from estimator.formatting import printable
from estimator.hardware.cluster import Cluster, ClusterNodes
from estimator.rightsizing.report import StepReport
from estimator.rightsizing.usage import Sizes
from flows.commands import answers, costs, rightsize, runs
from flows.doctor import command as doctor
from flows.doctor.line import Line
from launchers.gang.failures import Failure, GangFailed
from launchers.inference import side_by_side
from launchers.report.terminal import StepProgress
from tests.checklist.runs import cpu_run
from tests.decorators.backends.plans import planned

ROOT = Path(__file__).parents[2]
PACKAGES = ("checklist", "decorators", "estimator", "flows", "launchers")
HOSTILE = (
    "node\x1b]52;c;cm0gLXJm\x07b",  # writes the clipboard
    "node\x1b]0;title\x1b\\b",
    "node\x1b[2J\x1b[31mb",
    "node\x9b31mb",  # C1
    "node\u202egpj.exe\u2066b",  # bidirectional override and isolate
    "node\x00\x08\x7f\rb",
    "node[link=http://evil.example]x[/link]",
    "node[/b]",  # rich raises MarkupError for it
    "node\ud800b",
)
NAMES = ("print", "write", "echo", "Console")
WRITERS = ("sys.stdout.write", "sys.stderr.write", "typer.echo", "click.echo")
HARMLESS = ("json.dumps(", "self._page(", "help_page(", "run_help.")  # JSON is ASCII
# terminal.py itself; answers of chat, escaped in a terminal only; a script that runs without this package
ALLOWED = (
    "estimator/terminal.py:",
    "launchers/inference/terminal.py:",
    "launchers/inference/fetch_in_pod.py:",
)
ACTIVE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def poisoned(value: Any, name: str) -> Any:
    """Return a copy of a record in which every text is ``name``."""
    if isinstance(value, str):
        return name
    if isinstance(value, tuple | list):
        return type(value)(poisoned(each, name) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, poisoned(getattr(value, field.name), name))
        return changed
    return value


def _checklist(name: str) -> None:
    result = judge(cpu_run(2, local=True))
    checks = tuple(dataclasses.replace(item, check=name, reason=name) for item in result.checks)
    checklist_terminal.show(dataclasses.replace(result, checks=checks, notes=(name,), headline=name))


def _findings(name: str) -> None:
    findings = Findings(where=name)
    findings.unknown(name, name, name)
    findings.show()


def _live(name: str) -> None:
    progress = StepProgress()
    progress.update(f"step 1/2  {name}")
    progress.close()


def _runs(name: str) -> None:
    record = RunRecord(
        run=name,
        started=datetime.now(timezone.utc),
        state=name,
        plan=planned("llama-8b", "lora", "L40S", 1),
        settings={name: name},
    )
    without_settings = [record, dataclasses.replace(record, settings={})]
    out = output.console()
    out.print(runs._figures(without_settings))
    out.print(runs._settings(without_settings))


def _answers(name: str) -> None:
    row = side_by_side.Row(prompt=name, answers=(name,))
    output.console().print(answers.terminal_table(side_by_side.Comparison(columns=(name,), rows=(row,))))


def _hardware(name: str) -> None:
    gpu, machine = hardware.current().gpus[0], hardware.current().instances[0]
    group = ClusterNodes(
        instance=machine,
        gpu=gpu,
        count=1,
        cpu=1.0,
        memory_bytes=1,
        ephemeral_bytes=1,
        efa=0,
        spot=None,
        zones=(name,),
        taints=(name,),
        names=(name,),
        added_by=name,
    )
    cluster = Cluster(context=name, nodes=(poisoned(group, name),))
    gpus._print_tables((poisoned(gpu, name),), (poisoned(machine, name),), cluster)


def _models(name: str) -> None:
    row = dataclasses.replace(models._row("llama-3.1-8b"), name=name, aliases=(name,), family=name)
    models._print_tables([row])
    models._print_tables([row, row])


def _tables(name: str) -> None:
    out = output.console()
    total = Total(name=name, runs=1, hours=1, failed_hours=0, usd=None, unpriced_hours=0, unfinished=0)
    out.print(costs._table([total], name))
    sizes = Sizes(gpus=1, gpu_type=name)
    report = StepReport(
        flow=name,
        step=name,
        tasks=1,
        out_of_memory=0,
        hours=1,
        requested=sizes,
        used=sizes,
        next_request=None,
        usd=None,
        wasted_usd=None,
    )
    out.print(rightsize._table([report]))
    out.print(doctor._table(name, [Line(check=name, state="no", found=name, fix=name)]))


def _log(name: str) -> None:
    logs.setup("info")
    try:
        logging.getLogger("launchers.x").info("node %s", name)
        try:
            raise ValueError(name)
        except ValueError:
            logging.getLogger("launchers.x").exception("failed")
    finally:
        logs.reset()


def _gang(name: str) -> None:
    failure = Failure(kind="rank", node=0, host=name, at=0.0, message=name, traceback=name)
    sys.stderr.write(f"{GangFailed(failure)}\n")


PRINTERS: dict[str, Callable[[str], object]] = {
    "print": lambda name: terminal.print("answer:", name, file=sys.stderr),
    "note": output.note,
    "console": lambda name: terminal.console().print(name, style="bold"),
    "live": _live,
    "hardware": _hardware,
    "models": _models,
    "checklist": _checklist,
    "findings": _findings,
    "runs": _runs,
    "answers": _answers,
    "tables": _tables,
    "log": _log,
    "gang": _gang,
}


@pytest.mark.parametrize("printer", PRINTERS)
def test_foreign_names_are_printed_as_plain_text(
    printer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for name in HOSTILE:
        PRINTERS[printer](name)
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert not ACTIVE.search(text), ascii(text)
        assert "node" in text
        if printer in ("print", "note", "log", "gang"):  # tables crop, and rich itself drops some controls
            assert printable(name) in text


def test_program_output_is_exact_but_escaped_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a: \x1b]0;title\x07\n"
    terminal.write_data(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.write_data(text)
    assert capsys.readouterr().out == printable(text)


def test_every_module_prints_through_the_escaping_functions() -> None:
    """Constants, JSON (ASCII) and help pages are allowed; the rich console is created in one place."""
    wrong = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if not re.search(r"\b(print|write|echo|Console)\(", text):
                continue
            tree = ast.parse(text)
            place = path.relative_to(ROOT).as_posix()
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "estimator.terminal"
                for alias in node.names
            }
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                if getattr(call.func, "id", getattr(call.func, "attr", "")) not in NAMES:
                    continue
                call_name = ast.unparse(call.func)
                harmless = all(_is_harmless(argument) for argument in call.args)
                prints = (call_name == "print" and "print" not in imported) or call_name in WRITERS
                if (prints and not harmless) or call_name == "Console":
                    wrong.append(f"{place}:{call.lineno} {call_name}")
    assert [line for line in wrong if not line.startswith(ALLOWED)] == []


def _is_harmless(argument: ast.expr) -> bool:
    if isinstance(argument, ast.BinOp):
        return _is_harmless(argument.left) and _is_harmless(argument.right)
    return isinstance(argument, ast.Constant) or ast.unparse(argument).startswith(HARMLESS)
