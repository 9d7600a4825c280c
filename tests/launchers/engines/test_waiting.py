"""The time in collectives, of two real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.engines import ranks

_RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
from launchers.engines.waiting import Waiting
dist.init_process_group("gloo")
waiting = Waiting(torch.device("cpu"))
value, every = torch.ones(1024), torch.ones(2048)
calls = {
    "sync": lambda: dist.all_reduce(value),
    "async": lambda: dist.all_reduce(value, async_op=True).wait(),
    "gather": lambda: dist.all_gather_into_tensor(every, value),
}
seconds = {}
for name, call in calls.items():
    dist.barrier()
    waiting.begin()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    call()
    seconds[name] = waiting.seconds()
json.dump(seconds, open(sys.argv[1], "w"))
"""


def test_an_early_rank_waits_in_collectives_and_a_late_one_does_not(tmp_path: Path) -> None:
    early, late = ranks.run_script(_RANK, tmp_path)
    for name, waited in early.items():
        assert waited > 0.4, name
        assert late[name] < 0.3, name


def test_a_single_process_reports_no_time_in_collectives() -> None:
    torch = pytest.importorskip("torch")
    from launchers.engines.waiting import Waiting

    assert Waiting(torch.device("cpu")).seconds() is None
