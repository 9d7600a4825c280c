"""Time in collectives of two real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.engines import ranks

_RANK = """
import time
import torch
from launchers.engines.waiting import Waiting
waiting = Waiting(torch.device("cpu"))
value, every = torch.ones(1024), torch.ones(2048)
calls = {
    "sync": lambda: dist.all_reduce(value),
    "async": lambda: dist.all_reduce(value, async_op=True).wait(),
    "gather": lambda: dist.all_gather_into_tensor(every, value),
}
result = {}
for name, call in calls.items():
    dist.barrier()
    waiting.begin()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    call()
    result[name] = waiting.seconds()
"""


@pytest.mark.slow  # two processes import torch
def test_an_early_rank_waits_in_collectives_and_a_late_one_does_not(tmp_path: Path) -> None:
    early, late = ranks.run_script(_RANK, tmp_path)
    for name, waited in early.items():
        assert waited > 0.4, name
        assert late[name] < 0.3, name


def test_wait_time_is_counted_per_step_and_only_with_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from launchers.engines import waiting

    assert waiting.Waiting(torch.device("cpu")).seconds() is None
    clock = iter((1.0, 1.5, 10.0, 12.0, 20.0, 20.25))
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(waiting.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(waiting.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(waiting.dist.Work, "wait", lambda _: "done")
    measured = waiting.Waiting(torch.device("cpu"))
    wait = waiting.dist.Work.wait
    assert [wait(None), wait(None)] == ["done", "done"]  # type: ignore[arg-type]
    assert measured.seconds() == 2.5
    measured.begin()
    wait(None)  # type: ignore[arg-type]
    assert measured.seconds() == 0.25
