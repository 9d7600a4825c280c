"""Count of the collectives and device reads of the code that runs in a context."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launchers import engines
from launchers.gang.job import TrainJob
from tests.launchers.engines import ranks


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by name, and numbers ("fetched") and truth values ("branches") that are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.calls[name] += 1
        if name == "aten::_local_scalar_dense":  # lengths of rows are whole numbers, and on the CPU
            self.calls["fetched"] += args[0].is_floating_point()
            self.calls["branches"] += args[0].dtype == torch.bool
        indices = args[1] if name == "aten::index" else ()  # the number of true ones is read
        self.calls["branches"] += any(index is not None and index.dtype == torch.bool for index in indices)
        return func(*args, **(kwargs or {}))


def named(calls: Counter[str], part: str) -> int:
    """Return the number of calls whose name contains ``part``."""
    return sum(count for name, count in calls.items() if part in name)


def calls_of(job: TrainJob) -> Counter[str]:
    """Train a job in its processes; return the counted calls of the first one."""
    done = ranks.train([job], entry=f"{__name__}:{train.__name__}")
    assert done.returncode == 0, done.stderr[-6000:]
    return Counter(json.loads((job.work_dir / "calls-0.json").read_text()))


def train(job: TrainJob) -> None:
    """Train a rank and write its counted calls to the work folder."""
    with Counting() as counting:
        engines.get(job.plan.engine).train(job)
    (job.work_dir / f"calls-{os.environ['RANK']}.json").write_text(json.dumps(counting.calls))
