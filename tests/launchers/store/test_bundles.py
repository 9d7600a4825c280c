"""A bundle is complete or absent; damaged data is never accepted."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.store.bundles import (
    BundleFile,
    DamagedError,
    LocalStorage,
    Manifest,
    fetch_files,
    get_bundle,
    has_bundle,
    put_bundle,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "sub").mkdir(parents=True)
    (root / "a.bin").write_bytes(b"a" * 1000)
    (root / "sub" / "a.bin").write_bytes(b"b" * 2000)
    (root / "sub" / "same").write_bytes(b"a" * 1000)
    (root / "empty").touch()
    return root


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


class Failing(LocalStorage):
    """Raises ``error`` at file number ``at``."""

    def __init__(self, root: Path, at: int, error: OSError) -> None:
        super().__init__(root)
        self.at, self.error, self.sent = at, error, 0

    def put_file(self, key: str, path: Path) -> None:
        self.sent += 1
        if self.sent == self.at:
            raise self.error
        super().put_file(key, path)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_stored_folder_is_fetched_unchanged(storage: LocalStorage, folder: Path, tmp_path: Path) -> None:
    put_bundle(storage, "run/part", folder)
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale").touch()
    get_bundle(storage, "run/part", out)
    assert tree(out) == tree(folder)
    assert not list(tmp_path.glob("*.tmp"))


def test_an_interrupted_upload_is_not_a_bundle_and_is_resumed(folder: Path, tmp_path: Path) -> None:
    storage = Failing(tmp_path / "store", 3, ConnectionError("network"))
    with pytest.raises(ConnectionError):
        put_bundle(storage, "b", folder)
    assert not has_bundle(storage, "b")
    put_bundle(storage, "b", folder)
    assert has_bundle(storage, "b")
    assert storage.sent == 3 + 2, "the first two were not sent again"


def test_a_full_store_is_a_user_error_and_leaves_no_partial_files(folder: Path, tmp_path: Path) -> None:
    storage = Failing(tmp_path / "store", 3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(UserError, match=r"No space left for .*store/b"):
        put_bundle(storage, "b", folder)
    assert storage.keys("b") == []
    assert tree(tmp_path / "store") == {}


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="only root may mount a small disk"
)
def test_a_disk_that_fills_up_during_an_upload_keeps_the_older_bundle(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {disk}") != 0:  # noqa: S605
        pytest.skip("mount is not allowed here")
    try:
        storage = LocalStorage(disk)
        put_bundle(storage, "old", folder)
        (folder / "large").write_bytes(os.urandom(500_000))
        with pytest.raises(UserError, match="No space left"):
            put_bundle(storage, "new", folder)
        assert storage.keys("new") == []
        assert has_bundle(storage, "old")
        assert not list(disk.rglob("*.tmp"))
    finally:
        os.system(f"umount {disk}")  # noqa: S605


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_file_is_named_and_no_files_are_left(
    storage: LocalStorage, folder: Path, tmp_path: Path, damage: str
) -> None:
    manifest = put_bundle(storage, "b", folder)
    file = next(file for file in manifest.files if file.name == "sub/a.bin")
    path = storage.root / "b" / file.key
    if damage == "bit":
        path.write_bytes(b"c" + path.read_bytes()[1:])
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert has_bundle(storage, "b") == (damage == "bit"), "sizes are compared, contents are not read"
    with pytest.raises(DamagedError, match=r"sub/a\.bin of .* is damaged"):
        get_bundle(storage, "b", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "store"]


SHA = "0" * 64
GOOD = {"name": "model/a.bin", "size": 4, "sha256": SHA}


@pytest.mark.parametrize(
    "files",
    [
        [{**GOOD, "name": "../../outside/pwn.py"}],
        [{**GOOD, "name": "model/../../pwn.py"}],
        [{**GOOD, "name": "{outside}/pwn.py"}],
        [{**GOOD, "name": "//pwn.py"}],
        [{**GOOD, "name": "./a.bin"}],
        [{**GOOD, "name": ""}],
        [{**GOOD, "name": "."}],
        [{**GOOD, "name": "a\0b"}],
        [{**GOOD, "name": "\ud800"}],
        [{**GOOD, "name": "a" * 256}],
        [{**GOOD, "name": "é" * 128}],
        [{**GOOD, "name": "a/"}],
        [{**GOOD, "name": ["a"]}],
        [GOOD, GOOD],
        [GOOD, {**GOOD, "name": "model"}],
        [{**GOOD, "size": "4"}],
        [{**GOOD, "size": -1}],
        [{**GOOD, "size": True}],
        [{**GOOD, "sha256": "../" * 5 + "x"}],
        [{**GOOD, "sha256": None}],
        [{**GOOD, "sha256": SHA[1:]}],
        [{**GOOD, "mode": 0o777}],
        ["model/a.bin"],
        None,
    ],
)
def test_a_crafted_manifest_is_refused_in_one_line_and_writes_nothing(
    storage: LocalStorage, folder: Path, tmp_path: Path, files: Any
) -> None:
    """Valid files in the same manifest are not written either."""
    BundleFile(name=f"{'a' * 255}/b", size=0, sha256=SHA)  # the longest name
    put_bundle(storage, "b", folder)
    path = storage.root / "b" / "manifest.json"
    good = json.loads(path.read_text())["files"]
    text = json.dumps({"files": files if files is None else good + files})
    path.write_text(text.replace("{outside}", str(tmp_path / "outside")))
    before = tree(tmp_path)
    out = tmp_path / "runs" / "1" / "out"
    for fetch in (fetch_files, get_bundle):
        with pytest.raises(DamagedError, match=r"^manifest\.json of .*store/b is damaged: ") as caught:
            fetch(storage, "b", out)
        assert "\n" not in caught.value.problem
        assert "traceback" not in caught.value.problem.lower()
    assert tree(tmp_path) == before
    assert not out.exists()
    assert not has_bundle(storage, "b")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\xff", '{"files": 7}'])
def test_a_missing_manifest_is_reported_and_an_invalid_one_is_damaged(
    storage: LocalStorage, tmp_path: Path, text: str
) -> None:
    with pytest.raises(UserError, match="no complete bundle"):
        get_bundle(storage, "b", tmp_path / "out")
    storage.put_bytes("b/manifest.json", text.encode("latin-1"))
    with pytest.raises(DamagedError, match="it is not a list of files"):
        get_bundle(storage, "b", tmp_path / "out")


@pytest.mark.parametrize("name", ["sub", "sub/a.bin", "a.bin"])
def test_nothing_is_fetched_through_a_symbolic_link(
    storage: LocalStorage, folder: Path, tmp_path: Path, name: str
) -> None:
    put_bundle(storage, "b", folder)
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(outside if name == "sub" else outside / "file")
    with pytest.raises(UserError, match=f"{out / name} is a symbolic link"):
        fetch_files(storage, "b", out)
    assert not list(outside.iterdir())
    assert list(tree(out)) == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "a/"])
def test_keys_cannot_leave_the_store(storage: LocalStorage, key: str) -> None:
    with pytest.raises(ValueError, match="storage key"):
        storage.put_bytes(key, b"")


def test_deleted_keys_leave_no_empty_folders(storage: LocalStorage) -> None:
    storage.put_bytes("a/b/c", b"1")
    assert storage.keys("a") == ["a/b/c"]
    assert storage.delete(["a/b/c", "a/never"])
    assert not (storage.root / "a").exists()
    assert storage.keys("a") == []


@pytest.fixture
def stored(tmp_path: Path, storage: LocalStorage) -> LocalStorage:
    """A store with the bundle "b" of 3,000 bytes in two files."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one").write_bytes(b"1" * 1000)
    (tmp_path / "in" / "two").write_bytes(b"2" * 2000)
    put_bundle(storage, "b", tmp_path / "in")
    return storage


@pytest.mark.parametrize(("free", "fits"), [(3000, True), (2999, False)])
def test_a_bundle_is_fetched_only_if_it_fits_on_the_disk(
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
def test_only_the_error_of_a_full_disk_is_a_user_error(
    stored: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    def fail(key: str, path: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(stored, "get_file", fail)
    with pytest.raises(error):
        fetch_files(stored, "b", tmp_path / "out")
    monkeypatch.setattr(stored, "put_file", fail)
    (tmp_path / "in" / "three").touch()
    with pytest.raises(error):
        put_bundle(stored, "new", tmp_path / "in")


def test_a_disk_that_is_too_small_is_reported_in_gib(
    stored: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BundleFile(name="large", size=5 * 2**30, sha256=SHA)
    stored.put_bytes("b/manifest.json", Manifest(files=(file,)).to_json())
    free = SimpleNamespace(free=3 * 2**30)
    monkeypatch.setattr("launchers.store.bundles.shutil.disk_usage", lambda _: free)
    with pytest.raises(UserError, match=r"\b5\.00 GiB.*\b3\.00 GiB"):
        fetch_files(stored, "b", tmp_path / "out")
