"""Exchange of values between two real gloo processes, one of which may be hostile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launchers.engines import ranks

OBJECTS = r"\b(all_gather_object|gather_object|broadcast_object_list|scatter_object_list|send_object_list)\b"
_RANK = """
import pickle
import torch
from launchers.engines import gathering

class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1] + ".executed",)

cpu, rank, result = torch.device("cpu"), dist.get_rank(), []
result.append(gathering.gather_json({"rank": rank, "text": "\\u00fc" * (rank * 3)}, cpu))
result.append(gathering.gather_json(None, cpu))
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
        result.append(str(error))
"""


@pytest.mark.slow  # two processes import torch
def test_ranks_exchange_json_and_execute_nothing_that_a_hostile_rank_sends(tmp_path: Path) -> None:
    first, second = ranks.run_script(_RANK, tmp_path)
    good = [[{"rank": 0, "text": ""}, {"rank": 1, "text": "üüü"}], [None, None]]
    assert second == good
    assert first[:2] == good
    assert len(first) == 6
    assert "from 1 to" in first[-1]
    assert not list(tmp_path.glob("*.executed"))


def test_no_module_sends_pickled_objects_to_other_ranks() -> None:
    packages = ("checklist", "decorators", "flows", "launchers", "benchmarks")
    for path in (path for package in packages for path in (ranks.ROOT / package).rglob("*.py")):
        assert not re.search(OBJECTS, path.read_text()), path
