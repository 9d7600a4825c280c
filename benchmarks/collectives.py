"""Ratio of the bandwidth that the checklist reports to that of a bare loop of the same collective.

    python -m benchmarks.collectives [--repeats 5] [--nodes 2] [--seconds 240]

Writes benchmarks/results/collectives.{json,md}. In each run the checklist's timing
(checklist/checks/collectives/world_probe.py) and the bare collective take turns in random
order, over the same group and buffers, each after a barrier, and the slowest rank counts
(benchmarks/ratios.py). A ratio below 1 is the cost of our timing. Sizes below 64 KiB are latency and not
compared. Turns of all repeats count together; a size with few turns has a wide interval.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import ratios
from benchmarks.machine import describe
from checklist.analysis import busbw
from checklist.checks.collectives.operations import Unavailable, prepare
from checklist.checks.collectives.world_probe import WARM_UPS, mark, operations_of_turn, seconds_of_each, wait
from checklist.effort import EFFORTS
from checklist.probing.progress import Progress
from checklist.run.sweep import DTYPES, GROWTH, OPERATIONS, sizes
from launchers.engines.gathering import gather_json

RESULTS = Path(__file__).parent / "results"
GOAL = 0.98
PROFILE: Literal["standard"] = "standard"
MAX_TURNS = 100  # per cell and run
MIN_TURNS = 3  # per started cell, even if slow
START_S = 120.0  # limit for all ranks to join


def cases(cuda: bool) -> list[ratios.Cell]:
    """List operations, types and sizes of the profile's sweep that are limited by bandwidth."""
    effort = EFFORTS[PROFILE]
    largest = effort.largest_cuda if cuda else effort.largest_cpu
    return [
        (op, dtype, size)
        for op in OPERATIONS[PROFILE]
        for dtype in DTYPES
        for size in sizes(op, largest, GROWTH[PROFILE])
        if size >= ratios.SMALLEST_BYTES
    ]


def measure(ranks: int, seconds: float) -> dict[ratios.Cell, ratios.Turns]:
    """Run all cells with ``ranks`` processes on this machine; per cell, the seconds of the slowest rank."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure_as_rank, (ranks, folder, seconds), nprocs=ranks)  # type: ignore[no-untyped-call,attr-defined]
        of_cells = json.loads((Path(folder) / "turns.json").read_text())
    return {(op, dtype, size): (ours, bare) for op, dtype, size, ours, bare in of_cells}


def _measure_as_rank(rank: int, ranks: int, folder: str, seconds: float) -> None:
    cuda = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=START_S),
    )
    progress = Progress(Path(folder) / f"rank{rank}.progress", create=True)
    of_cells = []
    all_cases = cases(cuda)
    ends = time.monotonic() + seconds
    for number, (op, dtype, size) in enumerate(all_cases):
        # Each case gets an equal part of the remaining time
        share = (ends - time.monotonic()) / (len(all_cases) - number)
        if not _all_continue(share > 0, device):
            break
        elements = busbw.buffer_elements(op, size, DTYPES[dtype], ranks)
        turns = list(_turns(f"{op} {dtype} {elements}", op, dtype, elements, device, progress.begin, share))
        of_ranks = gather_json(turns, device)
        if turns:
            every_turn = zip(*of_ranks, strict=True)
            slowest = [tuple(map(max, zip(*of_turn, strict=True))) for of_turn in every_turn]
            actual = busbw.actual_bytes(op, elements, DTYPES[dtype], ranks)
            of_cells.append([op, dtype, actual, [ours for ours, _ in slowest], [bare for _, bare in slowest]])
    if rank == 0:
        (Path(folder) / "turns.json").write_text(json.dumps(of_cells))
    dist.destroy_process_group()


def _turns(
    seed: str,
    op: str,
    dtype: str,
    elements: int,
    device: torch.device,
    begin: Callable[[], None],
    limit_s: float,
) -> Iterator[tuple[float, float]]:
    """Time an operation repeatedly: as the checklist times it, and in a bare loop."""
    work = prepare(op, getattr(torch, dtype), elements, dist.get_rank(), dist.get_world_size(), device)
    try:
        for _ in range(WARM_UPS):
            work.run()
        wait(device)
    except Unavailable:
        return
    together = operations_of_turn(device)
    order = random.Random(seed)  # every rank takes the same turns
    deadline = time.monotonic() + limit_s
    for turn in range(MAX_TURNS):
        if not _all_continue(turn < MIN_TURNS or time.monotonic() < deadline, device):
            return
        ours = bare = 0.0
        for plain in order.sample((False, True), 2):
            dist.barrier()  # so that no rank waits for another's previous turn
            wait(device)
            if plain:
                bare = _bare_loop(work.run, together, device)
            else:
                ours = sum(seconds_of_each(work.run, together, begin, device)) / together
        yield ours, bare


def _all_continue(proceed: bool, device: torch.device) -> bool:
    """Broadcast rank 0's decision, so that all ranks take the same number of turns."""
    decision = torch.tensor([int(proceed)], device=device)
    dist.broadcast(decision, 0)
    return bool(decision.item())


def _bare_loop(run: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the seconds per operation of a loop that contains nothing else."""
    if device.type == "cuda":
        first, last = mark(), mark()
        first.record()
        for _ in range(count):
            run()
        last.record()
        wait(device)
        return float(first.elapsed_time(last)) / 1000 / count
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def gather(runs: list[dict[ratios.Cell, ratios.Turns]]) -> dict[ratios.Cell, ratios.Turns]:
    """Merge the timings of all runs by operation, type and size."""
    turns: dict[ratios.Cell, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for run in runs:
        for cell, (ours, bare) in run.items():
            turns[cell][0].extend(ours)
            turns[cell][1].extend(bare)
    return dict(sorted(turns.items()))


def rows(cells: dict[ratios.Cell, ratios.Turns]) -> list[dict[str, Any]]:
    """Build one row per cell."""
    table = []
    for (op, dtype, size), turns in cells.items():
        ratio = ratios.of_cell(turns)
        table.append({"op": op, "dtype": dtype, "bytes": size, "turns": ratio.turns, **_interval(ratio)})
    return table


def _interval(ratio: ratios.Ratio) -> dict[str, float]:
    return {"ratio": round(ratio.value, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2, help="number of ranks; at least one per GPU")
    parser.add_argument("--seconds", type=float, default=240.0, help="duration of each run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of collectives.json and .md")
    chosen = parser.parse_args()
    ranks = max(chosen.nodes, torch.cuda.device_count())
    cells = gather([measure(ranks, chosen.seconds) for _ in range(chosen.repeats)])
    cuda = torch.cuda.device_count() >= ranks
    device, backend = ("cuda", "nccl") if cuda else ("cpu", "gloo")
    overall = ratios.overall(cells.values())
    table = rows(cells)
    command = (
        f"python -m benchmarks.collectives --repeats {chosen.repeats} --nodes {chosen.nodes} "
        f"--seconds {chosen.seconds:g}"
    )
    report = {
        "command": command,
        "machine": describe(),
        "device": device,
        "backend": backend,
        "goal": GOAL,
        "overall": {**_interval(overall), "turns": overall.turns},
        "rows": table,
    }
    chosen.out.mkdir(exist_ok=True)
    (chosen.out / "collectives.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# Reported bandwidth against a bare loop",
        "",
        f"`{command}`, {describe()['text']}; {backend}.",
        "",
        f"Ratio over all operations, types and sizes: **{overall.value:.3f}** (95 % interval "
        f"{overall.low:.3f} to {overall.high:.3f}, {overall.turns} turns; goal: {GOAL} or better). "
        "A cell's ratio is the median of its turns, the whole is the median of the cells.",
        "",
        "| Operation | Type | Bytes | Turns | Ratio | 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['op']} | {row['dtype']} | {row['bytes']} | {row['turns']} | {row['ratio']:.3f} "
        f"| {row['low']:.3f} to {row['high']:.3f} |"
        for row in table
    ]
    (chosen.out / "collectives.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
