from __future__ import annotations

from pathlib import Path

import pytest

from checklist.checks.gpu import load_probe
from checklist.probing.context import Context


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The only rank of a node, as its worker process sees it."""
    for name in ("RANK", "LOCAL_RANK", "NODE"):
        monkeypatch.setenv(f"CHECKLIST_{name}", "0")
    (tmp_path / "rank0.progress").write_bytes(bytes(256))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    monkeypatch.setattr(load_probe, "_EVERY_S", 0.01)
    return Context(tmp_path)
