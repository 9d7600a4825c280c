"""Collectives and device reads of a step do not grow with its micro batches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from launchers.dataset.prepared import Prepared
from launchers.engines.fsdp2.sharding import FullyShard
from launchers.engines.loop import train
from launchers.engines.loop.feed import Feed
from launchers.engines.loop.outcome import Outcome, StepCounts
from launchers.engines.loop.tasks import text_task_of
from launchers.engines.profiling import Profiler
from launchers.engines.waiting import Waiting
from launchers.gang import rank
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.telemetry import path_of
from tests.launchers.engines.counting import Counting, named
from tests.launchers.engines.loop import runs

CPU = torch.device("cpu")
ZERO = torch.zeros(())
ENV = RankEnv(rank=0, local_rank=0, world_size=2, local_world_size=2, node=0)


@pytest.fixture(autouse=True)
def _two() -> Iterator[None]:
    """Simulate the first of two processes; its collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int, **values: Any
) -> Counter[str]:
    """Count the calls of the second step, with ``accumulation`` micro batches per process."""
    batch = 2 * accumulation
    rows = runs.pairs(2 * batch) if values.get("task") == "orpo" else runs.documents(2 * batch)
    data_dir = runs.make_data(folder / f"data-{accumulation}", rows, batch=batch, steps=2)
    job = runs.make_job(
        folder / f"run-{accumulation}",
        folder / "model",
        data_dir,
        steps=2,
        micro=1,
        accumulation=accumulation,
        engine="fsdp2",
        sharding="fsdp",
        settings=values,
    )
    data = Prepared(data_dir)
    model = FullyShard().load(job, ENV, CPU)
    task = text_task_of(job.settings)
    feed = Feed(task, data, job, 0, CPU)
    reporter = RankReporter(job.telemetry_dir, ENV)
    profiler, waiting = Profiler(job, ENV, reporter, model.module), Waiting(CPU)
    lists: list[tuple[int, ...]] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point():
            lists.append(tuple(tensor.shape))
        return tolist(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", counted)
        for step in (1, 2):
            lists.clear()
            with Counting() as counting:
                train._step(model, job, ENV, data, task, feed, step, reporter, profiler, waiting)
    reporter.close()
    return counting.calls + Counter({"lists": len(lists)})


@pytest.mark.slow
@pytest.mark.parametrize(("method", "task"), [("full", "sft"), ("lora", "orpo")])
def test_loss_and_metrics_are_reduced_once_per_step_and_copied_together_with_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, task: str
) -> None:
    runs.make_model(tmp_path / "model")
    one, four = (of_a_step(tmp_path, monkeypatch, number, method=method, task=task) for number in (1, 4))
    assert one["lists"] == four["lists"] == 1
    assert one["fetched"] == four["fetched"] == 0
    assert named(one, "allreduce") == named(four, "allreduce") == 1, (
        "of loss and metrics; the mode doesn't see DTensor's, of the norm"
    )
    assert named(one, "scatter") > 0
    # gradients of adapters are kept whole until the last micro batch, those of a whole model are not
    assert named(four, "scatter") == named(one, "scatter") * (1 if method == "lora" else 4)


class _Idle:
    """A model, task and batches that take no time."""

    device = CPU
    metrics = ()

    def lr(self) -> float:
        return 1e-3

    def begin(self, *_: object) -> None:
        """Do nothing."""

    def prepare(self, _step: int) -> None:
        """Do nothing."""

    def step(self, _step: int) -> tuple[StepCounts, list[SimpleNamespace]]:
        return StepCounts(divisor=1), [SimpleNamespace(tokens=1024)]

    def outcome(self, *_: object) -> Outcome:
        return Outcome(loss=ZERO)

    def backward(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def update(self) -> torch.Tensor:
        return ZERO


def test_a_step_without_work_takes_few_calls_and_short_steps_share_a_query_of_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 0.1B model makes 20 steps a second, of which 0.5 % are 250 us: 700 calls of 0.35 us each."""
    data_dir = runs.make_data(tmp_path / "data", runs.documents(4), batch=2, steps=2)
    job = runs.make_job(tmp_path / "run", runs.make_model(tmp_path / "model"), data_dir, steps=2, world=1)
    idle: Any = _Idle()
    reporter = RankReporter(job.telemetry_dir, ENV)
    monkeypatch.setattr(rank, "MEMORY_INTERVAL_S", 3600.0)
    profiler, waiting = Profiler(job, ENV, reporter, torch.nn.Linear(1, 1)), Waiting(CPU)
    queries: list[object] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: queries.append(0) or {})
    calls: Counter[str] = Counter()
    for step in (1, 2):  # the first has imports
        calls.clear()
        sys.setprofile(lambda _frame, event, _argument: calls.update([event]))
        try:
            train._step(idle, job, ENV, idle, idle, idle, step, reporter, profiler, waiting)
        finally:
            sys.setprofile(None)
    reporter.close()
    assert calls["call"] + calls["c_call"] < 700
    assert len(path_of(job.telemetry_dir, 0).read_text().splitlines()) == 2 + 1
    assert len(queries) == 1
