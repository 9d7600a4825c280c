"""A checkpoint counts when the parts of all nodes are stored; resuming uses the newest valid one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers.store.bundles import DamagedError, LocalStorage
from launchers.store.checkpoints import CheckpointStore, restore_newest


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def part(tmp_path: Path, step: int, node: int) -> Path:
    folder = tmp_path / f"part-{step}-{node}"
    folder.mkdir(exist_ok=True)
    (folder / f"state-{node}.bin").write_bytes(f"{step}/{node}".encode() * 100)
    return folder


def save(store: CheckpointStore, tmp_path: Path, step: int, nodes: int = 2) -> None:
    for node in range(nodes):
        store.put_part(step, node, part(tmp_path, step, node))
    store.commit(step, nodes=nodes, world_size=nodes, extra={"engine": "x"})


def test_a_checkpoint_is_committed_only_with_the_parts_of_all_nodes(
    storage: LocalStorage, tmp_path: Path
) -> None:
    store = CheckpointStore(storage, "run")
    store.put_part(5, 0, part(tmp_path, 5, 0))
    with pytest.raises(RuntimeError, match=r"parts of nodes \[1\]"):
        store.commit(5, nodes=2, world_size=2, extra={})
    store.put_part(5, 1, part(tmp_path, 5, 1))
    assert store.latest() is None
    with pytest.raises(ValueError, match="keep = 0"):
        CheckpointStore(storage, "run", keep=0)


def test_restoring_merges_the_files_of_all_nodes(storage: LocalStorage, tmp_path: Path) -> None:
    store = CheckpointStore(storage, "run")
    save(store, tmp_path, 5)
    latest = store.latest()
    assert (latest.step, latest.nodes, latest.world_size, latest.extra) == (5, 2, 2, {"engine": "x"})
    store.restore(latest, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        "state-0.bin": b"5/0" * 100,
        "state-1.bin": b"5/1" * 100,
    }


def test_pruning_keeps_the_newest_checkpoints_and_removes_incomplete_ones(
    storage: LocalStorage, tmp_path: Path
) -> None:
    store = CheckpointStore(storage, "run", keep=2)
    store.put_part(1, 0, part(tmp_path, 1, 0))  # never committed
    for step in (2, 4, 6):
        save(store, tmp_path, step)
    store.put_part(8, 0, part(tmp_path, 8, 0))  # on its way
    store.prune()
    assert [checkpoint.step for checkpoint in store.candidates()] == [6, 4]
    assert sorted(p.name for p in (storage.root / "run").iterdir()) == [
        "step-00000004.0",
        "step-00000006.0",
        "step-00000008.0",
    ]


def test_a_damaged_newest_checkpoint_is_skipped_and_reported(storage: LocalStorage, tmp_path: Path) -> None:
    store = CheckpointStore(storage, "run")
    for step in (2, 4):
        save(store, tmp_path, step)
    newest = store.latest()
    (damaged,) = (storage.root / newest.key / "node-00001").glob("*-state-1.bin")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    with pytest.raises(DamagedError, match=r"state-1\.bin"):
        store.restore(newest, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    checkpoint, skipped = restore_newest(store, tmp_path / "out")
    assert checkpoint.step == 2
    assert len(skipped) == 1
    assert "step 4" in skipped[0]
    damaged.unlink()
    latest = store.latest()
    assert latest.step == 2, "one with a file missing is not whole"


def test_a_new_attempt_resumes_from_the_old_one_and_never_overwrites_it(
    storage: LocalStorage, tmp_path: Path
) -> None:
    save(CheckpointStore(storage, "run"), tmp_path, 10)
    second = CheckpointStore(storage, "run", attempt=1)
    latest = second.latest()
    assert latest.step == 10
    save(second, tmp_path, 10, nodes=1)
    assert [(c.attempt, c.step, c.nodes) for c in second.candidates()] == [(1, 10, 1), (0, 10, 2)]


def test_checkpoints_of_origin_runs_are_the_last_choice_and_never_pruned(
    storage: LocalStorage, tmp_path: Path
) -> None:
    origin = CheckpointStore(storage, "old/run", keep=5)
    for step in (2, 4, 6):
        save(origin, tmp_path, step)
    store = CheckpointStore(storage, "new/run", origins=("old/run",), keep=1)
    latest = store.latest()
    assert latest.key.startswith("old/run")
    save(store, tmp_path, 3)
    assert [(c.key.split("/")[0], c.step) for c in store.candidates()] == [
        ("new", 3),
        ("old", 6),
        ("old", 4),
        ("old", 2),
    ]


def test_the_checkpoint_of_the_best_step_is_kept_at_any_age_and_can_be_restored(
    storage: LocalStorage, tmp_path: Path
) -> None:
    first = CheckpointStore(storage, "run", keep=1, notes=lambda _: {"best_step": 2})
    for step in (2, 4, 6):
        save(first, tmp_path, step)
    assert [checkpoint.step for checkpoint in first.candidates()] == [6, 2]
    retried = CheckpointStore(storage, "run", attempt=1, keep=1, notes=lambda _: {"best_step": 2})
    save(retried, tmp_path, 8)
    assert [(checkpoint.step, checkpoint.attempt) for checkpoint in retried.candidates()] == [(8, 1), (2, 0)]
    resumed = CheckpointStore(storage, "other", origins=["run"])
    best, skipped = restore_newest(resumed, tmp_path / "best", step=2)
    assert (best.step, skipped) == (2, ())
    assert (tmp_path / "best" / "state-0.bin").read_bytes() == b"2/0" * 100
    better = CheckpointStore(storage, "run", attempt=1, keep=1, notes=lambda step: {"best_step": step})
    save(better, tmp_path, 10)
    assert [checkpoint.step for checkpoint in better.candidates()] == [10]
    assert restore_newest(better, tmp_path / "gone", step=2) == (None, ())


def test_pruning_keeps_unfinished_newer_checkpoints_and_files_that_are_not_checkpoints(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(tmp_path / "store")
    store = CheckpointStore(storage, "run", attempt=1, keep=1)
    commit = json.dumps({"step": 5, "nodes": 0, "world_size": 1, "at": 0.0, "extra": {}}).encode()
    for name in ("step-00000005.1", "step-00000005.0"):
        storage.put_bytes(f"run/{name}/checkpoint.json", commit)
    for name in ("step-00000004.1", "step-00000006.1", "step-00000001.2", "step-00000009.0", "notes"):
        storage.put_bytes(f"run/{name}/node-00000/part", b"")
    store.prune()
    assert sorted(path.name for path in (storage.root / "run").iterdir()) == [
        "notes",
        "step-00000001.2",
        "step-00000005.1",
        "step-00000006.1",
    ]


def test_without_a_committed_checkpoint_pruning_removes_earlier_attempts_alone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    for name in ("step-00000001.0", "step-00000000.1"):
        storage.put_bytes(f"run/{name}/node-00000/part", b"")
    CheckpointStore(storage, "run", attempt=1).prune()
    assert [path.name for path in (storage.root / "run").iterdir()] == ["step-00000000.1"]
