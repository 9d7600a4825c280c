"""Parts of a precomputation that are already stored or never arrive."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.precompute import parts
from launchers.store.bundles import LocalStorage

DIVISION = parts.Parts(
    name="reference", module="no_such_module", fingerprint="abc", count=5, size=2, suffix=".npy"
)


def fetch(store: LocalStorage, work: Path, *, node: int = 0, nodes: int = 1) -> list[Path]:
    address = NodeAddress(
        node=node, nodes=nodes, main_host="127.0.0.1", ports=(1,), secret=Secret("s"), run="test"
    )
    return parts.compute_all(DIVISION, {}, address, store, work, on_cpu=True, limit_s=0.1)


def test_stored_parts_are_fetched_without_computing_and_parts_of_other_nodes_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "_POLL_S", 0.01)
    store = LocalStorage(tmp_path / "store")
    for part in DIVISION.numbers:
        store.put_bytes(DIVISION.key(part), bytes([part]))
    assert [file.read_bytes() for file in fetch(store, tmp_path / "work")] == [b"\0", b"\1", b"\2"]
    assert "reference: 3 of 3 parts are already stored" in capsys.readouterr().out
    store.delete([DIVISION.key(1)])
    with pytest.raises(UserError, match="Another node has not finished its part of the reference"):
        fetch(store, tmp_path / "other", nodes=2)


def test_a_fingerprint_covers_texts_and_names_sizes_heads_and_tails_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_HASHED_BYTES", 2)
    contents = {"a": b"0123456", "b": b"0123456", "c": b"01234567", "d": b"x123456", "e": b"012345x"}
    for folder, content in contents.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ("other" if folder == "b" else "file")).write_bytes(content)
    prints = {folder: parts.fingerprint(["t"], (tmp_path / folder).iterdir()) for folder in contents}
    assert len({*prints.values(), parts.fingerprint(["u"], (tmp_path / "a").iterdir())}) == 6
    (tmp_path / "a" / "file").write_bytes(b"01xxx56")
    assert parts.fingerprint(["t"], (tmp_path / "a").iterdir()) == prints["a"], "the middle is not read"
