"""A bundle and its disk at their limits, and what pruning leaves."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from estimator.errors import UserError
from launchers.store.bundles import BundleFile, LocalStorage, Manifest, fetch_files, has_bundle, put_bundle
from launchers.store.checkpoints import CheckpointStore

SHA = "0" * 64


@pytest.fixture
def stored(tmp_path: Path) -> LocalStorage:
    """A store with the bundle "b" of 3,000 bytes in two files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one").write_bytes(b"1" * 1000)
    (folder / "two").write_bytes(b"2" * 2000)
    storage = LocalStorage(tmp_path / "store")
    put_bundle(storage, "b", folder)
    return storage


@pytest.mark.parametrize(("free", "fits"), [(3000, True), (2999, False)])
def test_a_bundle_is_fetched_where_it_just_fits(
    stored: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr("launchers.store.bundles.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    out = tmp_path / "out"
    if fits:
        assert fetch_files(stored, "b", out).total_bytes == 3000
    else:
        with pytest.raises(UserError, match="No space left"):
            fetch_files(stored, "b", out)
        fetch_files(stored, "b", out, include=lambda name: name == "one")
    assert sorted(path.name for path in out.iterdir()) == ["one", "two"][: 1 + fits]


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, UserError), (errno.EACCES, PermissionError)])
def test_only_a_full_disk_is_explained(
    stored: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    def fail(key: str, path: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(stored, "get_file", fail)
    with pytest.raises(error):
        fetch_files(stored, "b", tmp_path / "out")
    monkeypatch.setattr(stored, "put_file", lambda key, path: fail(key, path))
    (tmp_path / "folder" / "three").touch()
    with pytest.raises(error):
        put_bundle(stored, "new", tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "size", "sha"),
    [
        ("a" * 256, 1, SHA),
        ("é" * 128, 1, SHA),
        ("a", -1, SHA),
        ("a", True, SHA),
        ("a", 1, SHA[1:]),
        ("a/", 1, SHA),
    ],
)
def test_a_file_beyond_its_limits_is_refused(name: str, size: int, sha: str) -> None:
    BundleFile(name=f"{'a' * 255}/b", size=0, sha256=SHA)
    with pytest.raises(ValueError, match=r"name|size|SHA-256"):
        BundleFile(name=name, size=size, sha256=sha)


def test_a_manifest_adds_up_and_a_file_of_another_size_is_not_there(stored: LocalStorage) -> None:
    manifest = Manifest.from_json(stored.get_bytes("b/manifest.json"))
    assert (manifest.total_bytes, len(manifest.files)) == (3000, 2)
    assert has_bundle(stored, "b")
    (stored.root / "b" / manifest.files[1].key).write_bytes(b"2" * 1999)
    assert not has_bundle(stored, "b")


def test_pruning_spares_what_is_newer_than_the_newest_and_what_is_not_a_checkpoint(tmp_path: Path) -> None:
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


def test_a_disk_that_is_too_small_is_told_in_gib(
    stored: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BundleFile(name="large", size=5 * 2**30, sha256=SHA)
    stored.put_bytes("b/manifest.json", Manifest(files=(file,)).to_json())
    monkeypatch.setattr(
        "launchers.store.bundles.shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 2**30)
    )
    with pytest.raises(UserError, match=r"\b5\.00 GiB.*\b3\.00 GiB"):
        fetch_files(stored, "b", tmp_path / "out")
