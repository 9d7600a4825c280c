"""Fixtures that several folders of tests share."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import control_plane as lab


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: one that is begun last keeps the other worker waiting."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def write_sums(path: Path) -> Path:
    """Sixty rows of arithmetic that a tiny model can begin to learn in a few steps."""
    rows = [
        {"instruction": "Add the two numbers.", "input": f"{a} and {b}", "output": f"The sum is {a + b}."}
        for a in range(1, 7)
        for b in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "sums.jsonl")


@pytest.fixture(autouse=True)
def no_earlier_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has measured before must not change what a test sees."""
    monkeypatch.setenv("FINETUNE_CALIBRATION", str(tmp_path_factory.getbasetemp() / "earlier-runs.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # refreshed prices
    monkeypatch.delenv("FINETUNE_HARDWARE", raising=False)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.ControlPlane]:
    """A Kubernetes API server on this machine with its controllers and scheduler, and JobSet's definition.

    It has no nodes. Users beside the administrator: "launcher" of the group finetune-launchers, and "alice".
    A test takes a namespace of its own, and leaves the server running.
    """
    if reason := lab.missing():
        pytest.skip(reason)
    users = {"launcher": ("finetune-launchers",), "alice": ()}
    with lab.ControlPlane(tmp_path_factory.mktemp("control-plane"), users=users) as started:
        yield started
