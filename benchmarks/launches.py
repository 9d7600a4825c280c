"""Count the kernels that the host launches in one training step, by part of the model.

    python -m benchmarks.launches       # two minutes, no GPU; writes estimator/data/launches.csv

The step is that of the training loop (launchers.engines.loop), on a tiny Llama in bf16 on the CPU. In eager
mode each of torch's operators launches one kernel, except views and allocations. In compiled blocks
Inductor's kernels, matrix products and attention are counted in a trace of torch's profiler. One block
launches half the difference between models of four and two blocks; the rest is outside of the blocks.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_speed import cases
from benchmarks.gpu_speed.cases import Case, Run
from benchmarks.on_gpu import data
from benchmarks.on_gpu.one_run import Order, prepare
from estimator.throughput.launches import TABLE
from estimator.vocabulary import LaunchedMethod
from launchers.dataset.prepared import Prepared
from launchers.engines.fsdp2.sharding import FullyShard
from launchers.engines.loop import train
from launchers.engines.loop.feed import Feed
from launchers.engines.loop.tasks import task_of
from launchers.engines.waiting import Waiting
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, RankReporter
from launchers.models import tiny_llama

CPU = torch.device("cpu")
BLOCKS = (2, 4)
METHODS: dict[str, LaunchedMethod] = {"full": "full", "adapters": "lora"}
SCALE = replace(cases.TINY, accumulation=1, tokens=64, steps=4)
WARM_UP = 2  # steps before the counted one: blocks are compiled by then, and the optimizer has its states
WITHOUT_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "_unsafe_view"),
}
PARTS = ("data", "forward", "backward", "optimizer")  # phases of a step
COMPILED_KERNEL = "graph_"  # prefix of Inductor's kernels in a trace
# Operators that Inductor calls instead of generating a kernel
CALLED = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention")
ENV = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of operators that launch a kernel, by pass. Takes the place of the loop's profiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self._pass = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in WITHOUT_KERNEL:
            self.calls[self._pass] += 1
        return func(*args, **(kwargs or {}))

    def begin(self, step: int) -> None:
        """Start a step."""

    def phase(self, name: str) -> None:
        """Start a pass."""
        self._pass = name

    def end(self) -> None:
        """End the step."""


class Annotations:
    """Annotations of the passes in a trace. Takes the place of the loop's profiler."""

    def __init__(self) -> None:
        self._open: Any = None

    def begin(self, step: int) -> None:
        """Start a step."""

    def phase(self, name: str) -> None:
        """Start a pass."""
        self.end()
        self._open = record_function(name)
        self._open.__enter__()

    def end(self) -> None:
        """End the pass."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None


def eager(run_step: Callable[[Any], None]) -> Counter[str]:
    """Count the operators of the step by pass."""
    operators = Operators()
    for _ in range(WARM_UP):
        run_step(operators)
    with operators:
        run_step(operators)
    return operators.calls


def compiled(run_step: Callable[[Any], None]) -> Counter[str]:
    """Count Inductor's kernels, products and attention of the step by pass."""
    annotations = Annotations()
    for _ in range(WARM_UP):
        run_step(annotations)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run_step(annotations)
    events = [(event.name, event.time_range.start) for event in trace.events() or ()]
    starts = sorted(
        (start, name) for name, start in events if name in ("forward", "backward", "data", "optimizer")
    )
    calls: Counter[str] = Counter()
    for name, start in events:
        if name.startswith((COMPILED_KERNEL, *CALLED)):
            calls[max(each for each in starts if each[0] <= start)[1]] += 1
    return calls


def job_of(folder: Path, method: LaunchedMethod, blocks: int, *, compiles: bool) -> TrainJob:
    """Prepare a job of a Llama with ``blocks`` blocks."""
    config = {**tiny_llama.CONFIG, "num_hidden_layers": blocks, "dtype": "bfloat16"}
    model = tiny_llama.make(folder / "model", config=config)
    run = Run(case=Case(model="tiny-llama", method=method, seq_len=64), engine="fsdp2")
    rows = data.write(folder / "rows.jsonl", model, cases.rows_needed(run, SCALE), 64)
    settings = cases.settings_of(run, SCALE, model, rows, None).model_dump(mode="json")
    settings |= {"compile": compiles, "precision": "bf16", "activation_checkpointing": False}
    return prepare(Order(settings=settings, warm_up=1, folder=folder / "run", data=folder / "data"))


def launches(method: LaunchedMethod, blocks: int, *, compiles: bool) -> Counter[str]:
    """Count the launches of a step by pass."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), method, blocks, compiles=compiles)
        rows = Prepared(job.data_dir)
        model = FullyShard().load(job, ENV, CPU)
        task = task_of(job.settings, job.reference, padding_free=False, images=None)
        feed = Feed(task, rows, job, 0, CPU)
        reporter, waiting = RankReporter(job.telemetry_dir, ENV), Waiting(CPU)

        def run_step(profiler: Any) -> None:
            """Run the first step (again): batches of other lengths would be compiled again."""
            train._step(model, job, ENV, rows, task, feed, 1, reporter, profiler, waiting)

        calls = (compiled if compiles else eager)(run_step)
        reporter.close()
    return calls


def rows_of(fusion: str, name: str) -> list[list[object]]:
    """Return the rows of a method: a block, and in eager mode what lies outside of the blocks."""
    few, many = (launches(METHODS[name], blocks, compiles=fusion == "compiled") for blocks in BLOCKS)
    block = {part: (many[part] - few[part]) // (BLOCKS[1] - BLOCKS[0]) for part in ("forward", "backward")}
    rows: list[list[object]] = [[fusion, name, "block", block["forward"], block["backward"]]]
    if fusion == "eager":
        # The first block of a model with adapters has no gradient of its input
        outside = {part: max(few[part] - BLOCKS[0] * block[part], 0) for part in block}
        rows.append([fusion, name, "outside", outside["forward"] + few["data"], outside["backward"]])
        rows.append([fusion, name, "optimizer", 0, few["optimizer"] + few["end"]])
    return rows


def write(path: Path, rows: list[list[object]], versions: Mapping[str, str]) -> None:
    """Write the table."""
    source = "python -m benchmarks.launches, " + ", ".join(
        f"{name} {each}" for name, each in versions.items()
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["fusion", "method", "part", "forward", "backward", "source"])
        writer.writerows([*row, source] for row in rows)


def main() -> None:
    """Count and write the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    torch._inductor.config.cpp.enable_kernel_profile = True  # Inductor's kernels appear in traces
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    rows = [row for fusion in ("eager", "compiled") for name in METHODS for row in rows_of(fusion, name)]
    dist.destroy_process_group()
    write(TABLE, rows, {name: version(name) for name in ("torch", "transformers", "peft")})
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
