"""``finetune runs``: comparison of finished runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decorators.past_runs import Attempt
from flows.commands import past_runs
from tests.decorators.backends.plans import planned
from tests.flows.conftest import STEPS, FlowRun, content_of_card
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(finished_run: Callable[[str, str, int], FlowRun]) -> FlowRun:
    return finished_run("torchtune", "lora", 1)


@pytest.fixture(scope="module")
def of_run(
    run: FlowRun, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """``of_run("costs", "--json")``: run ``finetune`` in the folder of that run."""
    script = tmp_path_factory.mktemp("command") / "finetune"
    script.write_text("from estimator.cli.app import main\nmain()\n")
    modules = ("estimator.cli.app", "flows.commands.costs", "flows.commands.past_runs", "flows.commands.runs")
    with WarmPython(*modules, "metaflow", environment=run.environment, folder=run.home) as warm:
        yield lambda *arguments: warm.run(
            [str(script), *arguments], folder=run.home, environment=run.environment
        )


def _finetune(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "estimator.cli.app", *arguments],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_finished_run_is_listed_in_the_table_the_html_page_and_the_json_output(
    run: FlowRun, of_run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    page = tmp_path / "runs.html"
    table = of_run("runs")
    assert table.returncode == 0, table.stderr
    assert run.run_id in table.stdout
    assert "held-out loss, before -> after" in table.stdout
    assert "held-out loss while training" in table.stdout
    as_json = of_run("runs", "--json", "--html", str(page), run.run_id[-4:])
    assert as_json.returncode == 0, as_json.stderr
    (record,) = json.loads(as_json.stdout)
    assert record["state"] == "finished"
    assert [metrics["step"] for metrics in record["metrics"]] == list(range(1, STEPS + 1))
    assert (record["measured"]["steps"], record["evaluations"][-1]["step"]) == (STEPS, STEPS)
    assert run.run_id in content_of_card(page.read_text())


def test_a_folder_without_runs_gives_a_two_line_error(tmp_path: Path) -> None:
    (tmp_path / ".metaflow").mkdir()
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = inherited | {"METAFLOW_DEFAULT_DATASTORE": "local", "METAFLOW_DEFAULT_METADATA": "local"}
    for arguments in (("runs", "123"), ("costs",)):
        done = _finetune(*arguments, cwd=tmp_path, env=env)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 2, done.stderr
        assert "FinetuneFlow" in done.stderr


def test_costs_are_summed_by_user_and_machines_without_a_price_are_reported(
    run: FlowRun, of_run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    reported = of_run("costs", "--json")
    assert reported.returncode == 0, reported.stderr
    (jane, everybody) = json.loads(reported.stdout)
    assert (jane["name"], everybody["name"]) == ("tester", "all")
    assert jane["runs"] == 1
    assert 0 < jane["hours"] * 3600 < 2 * run.seconds  # training and evaluation
    assert (jane["usd"], jane["unpriced_hours"]) == (None, jane["hours"])
    assert (jane["failed_hours"], jane["unfinished"]) == (0, 0)
    table = of_run("costs", "--by", "model", "--since", "1d")
    assert re.search(r"tiny-llama +1 .* unknown ", table.stdout)
    later = of_run("costs", "--by", "team", "--csv", "--since", "0h")
    assert later.stdout.splitlines() == [
        "team,runs,hours,failed_hours,usd,unpriced_hours,unfinished",
        "all,0,0.0,0.0,,0.0,0",
    ]


def test_an_hour_of_a_node_costs_its_share_of_the_price_in_the_plan() -> None:
    plan = planned("llama-70b", "full", "H100", 4)
    hourly = plan.prediction.usd_per_hour
    assert hourly is not None
    assert plan.evaluate.gpus_per_node < 8
    for step, gpus in (("train", 8), ("train_nodes", 8), ("evaluate", plan.evaluate.gpus_per_node)):
        role = past_runs._WITH_GPUS[step]
        span = past_runs._span(Attempt(seconds=7200.0, succeeded=False), plan, role)
        assert (span.hours, span.failed) == (2.0, True)
        assert span.usd_per_hour == pytest.approx(hourly / 4 * gpus / 8)
    assert past_runs._span(Attempt(seconds=None, succeeded=False), None, "train").usd_per_hour is None


def test_answers_of_a_run_and_its_base_follow_the_table_and_blind_columns_have_no_names(
    run: FlowRun, of_run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    prompts, key, scores = tmp_path / "prompts.txt", tmp_path / "key.json", tmp_path / "scores.py"
    prompts.write_text("What is 1 plus 2?\nWhat is 3 plus 4?\n")
    scores.write_text("def longer(prompt, answer):\n    return len(answer)\n")
    arguments = ("runs", run.run_id, f"--prompts={prompts}", "--max-new-tokens=4", f"--score={scores}:longer")
    done = of_run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [record["run"] for record in report["runs"]] == [run.run_id]
    assert report["answers"]["columns"] == [run.run_id, "base"]
    for row in report["answers"]["rows"]:
        assert row["scores"] == [len(answer) for answer in row["answers"]]
    blind = of_run(*arguments, f"--blind={key}")
    assert blind.returncode == 0, blind.stderr
    table = blind.stdout.partition("What is 1 plus 2?")
    assert table[1]
    assert "held-out loss" in table[0]
    assert "base" not in table[2]
    assert {*json.loads(key.read_text())["prompts"][0].values()} == {"What is 1 plus 2?", run.run_id, "base"}
    alone = of_run("runs", "--blind", str(key))
    assert alone.returncode == 2
    assert "--prompts" in alone.stderr


def _unfinished(*ends: str) -> Any:
    """Build an unfinished run with one task per item.

    "True" or "False": it ended, with or without success; "False by signal": ended by one; "": without an end.
    """
    tasks = []
    for end in ends:
        notes = [SimpleNamespace(name="attempt", value="0", created_at=1)]
        success = end.partition(" ")[0]
        notes += [SimpleNamespace(name="attempt_ok", value=success, created_at=2)] if end else []
        tasks.append(SimpleNamespace(metadata=notes, exception=ValueError() if end == "False" else None))

    class Run(list[Any]):
        finished = False

    return Run([tasks])


@pytest.mark.parametrize(
    ("alive", "ends", "state"),
    [
        (True, ("True", ""), "running"),
        (False, ("True", ""), "killed"),
        (False, ("True",), "killed"),
        (False, ("True", "False"), "failed"),
        (False, ("True", "False by signal"), "killed"),
        (None, ("True", ""), "running or killed"),
    ],
)
def test_an_unfinished_run_is_running_killed_or_failed(
    alive: bool | None, ends: tuple[str, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_runs._metaflow, "is_alive", lambda _: alive)
    assert past_runs._state(_unfinished(*ends)) == state
