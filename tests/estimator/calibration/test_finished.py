"""The store of finished runs: what comes back, and what is told of damaged lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator import calibration
from estimator.calibration import Store
from estimator.plan import GIB
from tests.estimator.calibration.finished_runs import finished


def test_a_stored_run_is_read_back_unchanged(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder" / "runs.jsonl")
    store.add(finished(reserved_bytes=5, allocated_bytes=4, torch="2.13.0"))
    assert store.read().finished == (finished(reserved_bytes=5, allocated_bytes=4, torch="2.13.0"),)
    assert store.read().problems == ()


def test_a_missing_store_is_empty(tmp_path: Path) -> None:
    assert Store(tmp_path / "none.jsonl").read() == calibration.Records((), ())


def test_a_run_that_was_stored_twice_counts_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.jsonl")
    store.add(finished("a"))
    store.add(finished("a"))
    store.add(finished("b"))
    assert [run.run for run in store.read().finished] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("half a li", "not JSON"),
        ("[1, 2]", "not a record"),
        ('{"schema": 99}', "its schema is 99"),
        ('{"schema": 1}', "missing"),
        (finished().to_json().replace('"run":', '"other":'), "unknown fields: other"),
        (finished().to_json().replace(str(22 * GIB), "-5"), "measured_bytes = -5"),
        (finished().to_json().replace(str(22 * GIB), str(500 * GIB)), "factor of 10"),
    ],
)
def test_a_damaged_line_is_reported_and_skipped(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{finished('a').to_json()}\n{line}\n{finished('b').to_json()}\n")
    known, problems = calibration.load(path)
    assert len(problems) == 1
    assert f"Skipped line 2 of {path}: " in problems[0]
    assert complaint in problems[0]
    correction = known.correction("torchtune", "lora", "H100 SXM")
    assert correction.runs == 2


def test_training_loops_of_users_do_not_correct_the_estimates_of_launched_engines(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.jsonl")
    store.add(finished("Own/1", own_loop=True, gpu="L4"))
    store.add(finished("FinetuneFlow/1"))
    for own_loops, gpu, other in ((True, "L4", "H100 SXM"), (False, "H100 SXM", "L4")):
        known, _ = calibration.load(store.path, own_loops=own_loops)
        assert known.correction("torchtune", "lora", gpu) is not None
        assert known.correction("torchtune", "lora", other) is None


def test_a_folder_at_the_path_of_the_store_is_reported_without_an_exception(tmp_path: Path) -> None:
    known, problems = calibration.load(tmp_path)
    assert problems == (f"Cannot read {tmp_path}: Is a directory.",)
    assert known.correction("torchtune", "lora", "H100 SXM") is None


def test_the_environment_sets_the_location_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FINETUNE_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Store().path == tmp_path / "metaflow-finetune" / "calibration.jsonl"
    monkeypatch.setenv("FINETUNE_CALIBRATION", str(tmp_path / "my.jsonl"))
    assert Store().path == tmp_path / "my.jsonl"
