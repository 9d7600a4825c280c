"""Screening with all nodes sending at once, in real processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checklist.analysis.screening import rates

COUNT, SIZE = 3, 1 << 20
_NODE = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
place, file = int(sys.argv[1]), Path(sys.argv[2])
from checklist.checks.collectives.screen_probe import screen
from checklist.checks.collectives.world_probe import store
context = SimpleNamespace(stored={}, local_rank=0, rank=place, progress=SimpleNamespace(begin=lambda: None))
if place == 0:
    file.with_suffix(".part").write_text(str(store(context, "127.0.0.1")))
    file.with_suffix(".part").rename(file)
import time
while not file.exists():
    time.sleep(0.02)
where = ("127.0.0.1", int(file.read_text()))
best = screen(context, where, "screen", "gloo", place, 3, 1 << 20, 2, 60.0)
assert not dist.is_initialized()
(file.parent / f"best-{place}").write_text(json.dumps(best))
while not all((file.parent / f"best-{n}").exists() for n in range(3)):
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_every_node_measures_every_ring_distance_and_destroys_its_process_group(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    nodes = [
        subprocess.Popen([sys.executable, "-c", _NODE, str(place), str(tmp_path / "port")], cwd=root)
        for place in range(COUNT)
    ]
    try:
        assert [node.wait(120) for node in nodes] == [0] * COUNT
    finally:
        for node in nodes:
            node.kill()
    best = np.array([json.loads((tmp_path / f"best-{place}").read_text()) for place in range(COUNT)])
    assert best.shape == (COUNT, COUNT - 1)
    rate = rates(best, SIZE)
    assert np.isnan(np.diag(rate)).all()
    off = rate[~np.eye(COUNT, dtype=bool)]
    assert ((off > 0.001) & (off < 1000)).all()
