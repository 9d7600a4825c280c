"""Exchange of values between two real processes over gloo, one of which may be hostile."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OBJECTS = r"\b(all_gather_object|gather_object|broadcast_object_list|scatter_object_list|send_object_list)\b"
_RANK = """
import json, os, pickle, sys
import torch, torch.distributed as dist
from launchers.engines import gathering

class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1] + ".executed",)

dist.init_process_group("gloo")
cpu, rank, seen = torch.device("cpu"), dist.get_rank(), []
seen.append(gathering.gather_json({"rank": rank, "text": "\\u00fc" * (rank * 3)}, cpu))
seen.append(gathering.gather_json(None, cpu))
for attack in (pickle.dumps(Evil()), b"[" * 100_000, b"", 2**40):
    if rank:
        size = attack if isinstance(attack, int) else len(attack)
        sizes = gathering._gather(torch.tensor([size]))
        if isinstance(attack, bytes) and attack:
            data = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            data[:size] = torch.frombuffer(bytearray(attack), dtype=torch.uint8)
            gathering._gather(data)
        continue
    try:
        gathering.gather_json(0, cpu)
    except ValueError as error:
        seen.append(str(error))
json.dump(seen, open(sys.argv[1], "w"))
"""


@pytest.mark.slow  # two processes import torch
def test_ranks_exchange_json_and_run_nothing_that_a_hostile_one_sends(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / str(rank))], env={**env, "RANK": str(rank)}, cwd=ROOT
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    good = [[{"rank": 0, "text": ""}, {"rank": 1, "text": "üüü"}], [None, None]]
    first, second = (json.loads((tmp_path / name).read_text()) for name in "01")
    assert second == good
    assert first[:2] == good
    assert len(first) == 6
    assert "from 1 to" in first[-1]
    assert not list(tmp_path.glob("*.executed"))


@pytest.mark.parametrize("package", ["checklist", "decorators", "flows", "launchers", "benchmarks"])
def test_no_code_of_ours_sends_pickled_objects_to_other_ranks(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not re.search(OBJECTS, path.read_text()), path
