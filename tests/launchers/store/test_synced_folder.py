"""A folder synchronized with the store while a script writes to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.store.bundles import ChangedError, LocalStorage
from launchers.store.synced_folder import SyncedFolder


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def _node(storage: LocalStorage, place: Path, node: int = 0, prefix: str = "runs/1/train") -> SyncedFolder:
    return SyncedFolder(storage, prefix, place / f"node-{node}", node=node)


def test_a_folder_is_stored_once_it_stops_changing_and_is_restored(
    storage: LocalStorage, tmp_path: Path
) -> None:
    first = _node(storage, tmp_path / "a")
    assert not first.restore()
    (first.folder / "step-1").mkdir()
    (first.folder / "step-1" / "model").write_text("one")
    assert not first.poll(), "it may still be written to"
    assert first.poll()
    assert not first.poll(), "nothing has changed"

    (first.folder / "step-2").write_text("half")
    assert not first.poll()
    restored = _node(storage, tmp_path / "b")
    assert restored.restore()
    assert (restored.folder / "step-1" / "model").read_text() == "one"
    assert not (restored.folder / "step-2").exists(), "it was being written when the script was killed"


def test_a_file_that_changes_during_an_upload_keeps_the_previously_stored_state(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _node(storage, tmp_path / "a")
    (node.folder / "model").write_text("one")
    assert node.poll(complete=True)
    (node.folder / "model").write_text("two")
    put_file = LocalStorage.put_file

    def slow(self: LocalStorage, key: str, path: Path) -> None:
        put_file(self, key, path)
        path.write_text("three, while it is stored")

    monkeypatch.setattr(LocalStorage, "put_file", slow)
    with pytest.raises(ChangedError):
        node.poll(complete=True)
    restored = _node(storage, tmp_path / "b")
    assert restored.restore()
    assert (restored.folder / "model").read_text() == "one"


def test_files_removed_by_the_script_are_removed_from_the_store(
    storage: LocalStorage, tmp_path: Path
) -> None:
    node = _node(storage, tmp_path)
    (node.folder / "old").write_text("old")
    assert node.poll(complete=True)
    (node.folder / "old").unlink()
    (node.folder / "new").write_text("new")
    assert node.poll(complete=True)
    assert len(storage.keys("runs/1/train")) == 2, "the manifest and one file"


def test_a_node_restores_the_files_of_all_nodes_and_stores_only_its_own(
    storage: LocalStorage, tmp_path: Path
) -> None:
    for number in (0, 1):
        node = _node(storage, tmp_path / "a", number)
        (node.folder / f"shard-{number}").write_text(str(number))
        assert node.poll(complete=True)
    restored = _node(storage, tmp_path / "b", 1)
    assert restored.restore()
    assert {path.name for path in restored.folder.iterdir()} == {"shard-0", "shard-1"}
    assert not restored.poll(complete=True)
    (restored.folder / "shard-0").write_text("changed here")
    assert restored.poll(complete=True)
    other = _node(storage, tmp_path / "c", 1)
    assert other.restore()
    assert (other.folder / "shard-0").read_text() == "changed here"


def test_a_constantly_growing_log_delays_no_checkpoint(storage: LocalStorage, tmp_path: Path) -> None:
    node = _node(storage, tmp_path / "a")
    (node.folder / "step-1").write_text("one")
    (node.folder / "log").write_text("1")
    assert not node.poll()
    (node.folder / "log").write_text("1, 2")
    assert node.poll()
    restored = _node(storage, tmp_path / "b")
    assert restored.restore()
    assert [path.name for path in restored.folder.iterdir()] == ["step-1"]


def test_a_removed_checkpoint_stays_stored_until_the_next_one_is(
    storage: LocalStorage, tmp_path: Path
) -> None:
    node = _node(storage, tmp_path / "a")
    (node.folder / "step-1").write_text("one")
    assert node.poll(complete=True)
    (node.folder / "step-1").unlink()
    (node.folder / "step-2").write_text("half")
    assert not node.poll()
    restored = _node(storage, tmp_path / "b")
    assert restored.restore()
    assert [path.name for path in restored.folder.iterdir()] == ["step-1"]
    assert node.poll()
    later = _node(storage, tmp_path / "c")
    assert later.restore()
    assert [path.name for path in later.folder.iterdir()] == ["step-2"]


def test_a_resumed_run_keeps_the_checkpoints_of_its_origin_for_its_own_retry(
    storage: LocalStorage, tmp_path: Path
) -> None:
    node = _node(storage, tmp_path / "a")
    (node.folder / "part-1").write_text("one")
    node.poll(complete=True)
    resumed = _node(storage, tmp_path / "b", prefix="runs/2/train")
    assert resumed.restore(["runs/0/train", "runs/1/train"])
    assert (resumed.folder / "part-1").read_text() == "one"
    (resumed.folder / "part-2").write_text("two")
    resumed.poll(complete=True)
    retried = _node(storage, tmp_path / "c", prefix="runs/2/train")
    assert retried.restore(["runs/1/train"])
    assert {path.name for path in retried.folder.iterdir()} == {"part-1", "part-2"}
