"""History of earlier runs: stored, read back, and failures stay open until a later pass clears them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest

from checklist import past_runs, result
from checklist.past_runs import PastRun, run_of
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs


def healthy(nodes: int = 8, at: float = 1_000.0, **changes: Any) -> Result:
    return judge(gpu_run(nodes, started_unix=at, **changes))


def slow(*names: int, at: float = 1_000.0, **changes: Any) -> Result:
    share = dict.fromkeys(names, 0.25)
    run = gpu_run(8, started_unix=at)
    return judge(with_pairs(run, Cluster(nodes=8, speed=45, transmit=share, receive=share)), **changes)


def open_nodes(*runs: Result) -> list[tuple[str, ...]]:
    return [item.nodes for item in past_runs.fold(map(run_of, runs)).open_failures]


@pytest.fixture(params=["file", "folder"])
def history_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "file":
        return tmp_path / "history.jsonl"
    (tmp_path / "history").mkdir()
    return tmp_path / "history"


def test_a_run_is_judged_by_the_measurements_of_earlier_runs(history_path: Path) -> None:
    past_runs.check_writable(history_path)
    for day in range(4):
        past_runs.append(healthy(at=1_000.0 + day), history_path)
    past = past_runs.read(history_path)

    assert past.problems == ()
    assert {item.unix for item in past.records} == {1_060.0 + day for day in range(4)}
    slower = gpu_run(8, started_unix=2_000.0)
    collectives = tuple(
        dataclasses.replace(item, busbw_gbytes_per_s=item.busbw_gbytes_per_s * 0.85)
        if item.op == "all_reduce" and item.busbw_gbytes_per_s
        else item
        for item in slower.collectives
    )
    judged = judge(dataclasses.replace(slower, collectives=collectives), history=past.records)
    check = judged.check("bandwidth")
    assert check.verdict == "FAIL"
    assert any(figure.basis == "history" for figure in check.figures)


def test_concurrent_runs_lose_no_open_failure() -> None:
    assert open_nodes(slow(2, at=1_000.0), slow(5, at=1_001.0)) == [("host-2",), ("host-5",)]


def test_a_failure_repeated_every_night_is_one_failure_since_its_first_night() -> None:
    runs: list[PastRun] = []
    for night in range(5):
        open_failures = past_runs.fold(runs).open_failures
        runs.append(run_of(slow(2, at=1_000.0 + night, open_failures=open_failures)))
    (item,) = past_runs.fold(runs).open_failures
    assert item.since_unix == 1_060.0


def test_open_failures_before_the_oldest_read_run_are_carried_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(past_runs, "MAX_RUNS", 1)
    first = slow(2)
    second = judge(gpu_run(4, started_unix=2_000.0, pairs=()), open_failures=first.open_failures())
    assert open_nodes(first, second) == [("host-2",)]


def test_a_run_stored_twice_counts_once(tmp_path: Path) -> None:
    result_made = healthy()
    past_runs.append(result_made, tmp_path)
    result.write(result_made, tmp_path / "copy.json")
    assert len(past_runs.read(tmp_path).records) == len(result_made.records)


def test_runs_of_another_schema_version_are_reported_in_one_line_and_left_unchanged(
    history_path: Path,
) -> None:
    for at in (1_000.0, 2_000.0):
        past_runs.append(healthy(at=at), history_path)
    for file in [history_path] if history_path.is_file() else sorted(history_path.iterdir()):
        text = file.read_text()
        begins = re.compile(r'^(\{\s*"version": )\d', re.MULTILINE)
        file.write_text(begins.sub(r"\g<1>7", text))

    past_runs.check_writable(history_path)
    past_runs.append(healthy(at=3_000.0), history_path)
    history = past_runs.read(history_path)

    (line,) = history.problems
    assert line.startswith(
        f"2 earlier runs of {history_path} cannot be used, and may contain an open failure."
    )
    ours = (
        past_runs.SCHEMA_VERSION if history_path.is_file() else result.SCHEMA_VERSION
    )  # a line, or a whole result
    assert f"has schema version 7; this program reads {ours}." in line
    assert {item.unix for item in history.records} == {3_060.0}
    assert (
        len(history_path.read_text().splitlines() if history_path.is_file() else list(history_path.iterdir()))
        == 3
    )


def test_an_incomplete_line_of_a_killed_writer_is_reported_and_the_next_run_starts_a_new_line(
    tmp_path: Path,
) -> None:
    history_path = tmp_path / "history.jsonl"
    past_runs.append(healthy(), history_path)
    history_path.write_text(history_path.read_text() + '{"version": 1, "finished_un')
    past_runs.check_writable(history_path)
    past_runs.append(healthy(at=2_000.0), history_path)
    history = past_runs.read(history_path)
    assert {item.unix for item in history.records} == {1_060.0, 2_060.0}
    assert [line.partition(". ")[2] for line in history.problems] == [
        "It is not JSON: its writer was killed, or it was edited."
    ]


@pytest.mark.parametrize("text", ["# Notes\n", "{\n}\n", "[1]\n"])
def test_a_file_that_is_not_a_history_is_refused_and_left_unchanged(tmp_path: Path, text: str) -> None:
    history_path = tmp_path / "notes"
    history_path.write_text(text)
    with pytest.raises(UserError, match="is not a history of the checklist"):
        past_runs.check_writable(history_path)
    assert history_path.read_text() == text


def test_an_unwritable_history_path_is_refused() -> None:
    with pytest.raises(UserError, match=r"--history /nowhere/a\.jsonl cannot be written"):
        past_runs.check_writable(Path("/nowhere/a.jsonl"))
    with pytest.raises(UserError, match="This run cannot be added to /dev/full: No space left"):
        past_runs.append(healthy(), Path("/dev/full"))


def _add(history_path: str, first: int) -> None:
    for number in range(5):
        past_runs.append(healthy(2, at=float(first + number)), Path(history_path))


@pytest.mark.slow
def test_runs_that_end_at_the_same_time_are_all_stored(tmp_path: Path) -> None:
    history_path = tmp_path / "history.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add, args=(str(history_path), n * 100)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    history = past_runs.read(history_path)
    assert history.problems == ()
    assert len({item.unix for item in history.records}) == 15
