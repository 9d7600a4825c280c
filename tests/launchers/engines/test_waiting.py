"""The time in collectives, of two real processes over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_who_comes_first_waits_and_who_comes_late_does_not(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **where}
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / str(rank))],
            env={**env, "RANK": str(rank)},
            cwd=root,
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    early, late = (json.loads((tmp_path / name).read_text()) for name in "01")
    for name, waited in early.items():
        assert waited > 0.4, name
        assert late[name] < 0.3, name


def test_a_process_without_others_has_no_such_time() -> None:
    torch = pytest.importorskip("torch")
    from launchers.engines.waiting import Waiting

    assert Waiting(torch.device("cpu")).seconds() is None
