"""Phase 3: collectives over all ranks: are their results right, and how long do they take?"""

from __future__ import annotations

import datetime
import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from checklist.probes.operations import Unavailable, prepare, wrong_values
from checklist.probes.transport import parse

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from checklist.probes.worker import Worker

_WARM_UPS = 2
_BLOCKS = 10


def store(worker: Worker, address: str) -> int:
    """Serve the store through which groups find each other (on rank 0); its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if "store" not in worker.kept:
        worker.kept["store"] = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return int(worker.kept["store"].port)


def client(where: tuple[str, int], prefix: str, limit_s: float) -> Store:
    """The store that rank 0 serves; each group has a prefix of its own."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=limit_s)
    return PrefixStore(prefix, TCPStore(where[0], where[1], is_master=False, timeout=limit))


def join(worker: Worker, where: tuple[str, int], group: str, backend: str, world: int, limit_s: float) -> int:
    """Make the group of all ranks; the number of ranks that it has."""
    import torch.distributed as dist

    start_group(worker, backend, client(where, group, limit_s), worker.rank, world, limit_s)
    worker.progress.begin()
    dist.barrier(**_barrier_options(worker))
    return dist.get_world_size()


def start_group(worker: Worker, backend: str, place: Store, rank: int, world: int, limit_s: float) -> None:
    """Join a group of ``world`` ranks as ``rank``."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(worker.local_rank)
    dist.init_process_group(
        backend,
        store=place,
        rank=rank,
        world_size=world,
        # Longer than the supervisor waits: it shall see who hangs, before the others give up.
        timeout=datetime.timedelta(seconds=2 * limit_s),
    )
    worker.kept["backend"] = backend


def end_group(worker: Worker) -> None:
    """Leave the group that this rank is in, if it is in one."""
    if worker.kept.pop("backend", None):
        import torch.distributed as dist

        dist.destroy_process_group()


def leave(worker: Worker) -> None:
    """The command that does the same."""
    end_group(worker)


def correct(worker: Worker, op: str, dtype: str, elements: int) -> dict[str, Any]:
    """Do ``op`` once with values that tell ranks and places apart; how many values are wrong here."""
    return _do(worker, op, dtype, elements, iterations=0)


def timed(worker: Worker, op: str, dtype: str, elements: int, iterations: int, bare: bool) -> dict[str, Any]:
    """Do ``op`` that often; seconds of each, and the wrong values of the last.

    ``bare``: in turns with plain loops with nothing around the operation; the mean seconds of each loop.
    """
    return _do(worker, op, dtype, elements, iterations, bare=bare)


def _do(
    worker: Worker, op: str, dtype: str, elements: int, iterations: int, *, bare: bool = False
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backend = worker.kept["backend"]
    device = torch.device("cuda", worker.local_rank) if backend == "nccl" else torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    work = prepare(op, getattr(torch, dtype), elements, rank, world, device)
    begin = worker.progress.begin
    try:
        for _ in range(_WARM_UPS if iterations else 1):
            begin()
            work.run()
        _wait(device)
    except Unavailable as error:
        return {"unavailable": str(error)}
    seconds: list[float] = []
    loops: list[float] = []
    for number, count in enumerate(_blocks(iterations) if bare else [iterations]):
        if bare and number % 2:  # in turns, and each in turn first: what drifts touches both
            loops.append(_bare_loop(work.run, count, device))
        seconds += _measure(work.run, count, begin, device)
        if bare and not number % 2:
            loops.append(_bare_loop(work.run, count, device))
    return {"seconds": seconds, "bare": loops, "wrong": wrong_values(work)}


def _blocks(iterations: int) -> list[int]:
    """That many iterations in up to ten parts."""
    parts = min(_BLOCKS, iterations)
    return [iterations // parts + (part < iterations % parts) for part in range(parts)]


def _measure(run: Any, iterations: int, begin: Any, device: Any) -> list[float]:
    """Seconds of each iteration. On a GPU between events, so that launching overlaps as in training."""
    import torch

    if device.type == "cuda":
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(iterations + 1)
        ]
        marks[0].record()
        for mark in marks[1:]:
            begin()
            run()
            mark.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
    times = [time.perf_counter()]
    for _ in range(iterations):
        begin()
        run()
        times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)]


def _bare_loop(run: Any, iterations: int, device: Any) -> float:
    """Seconds for each iteration of a loop with nothing in it but the operation."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(iterations):
        run()
    _wait(device)
    return (time.perf_counter() - begin) / max(1, iterations)


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _barrier_options(worker: Worker) -> dict[str, Any]:
    return {"device_ids": [worker.local_rank]} if worker.kept.get("backend") == "nccl" else {}


def transport(_: Worker) -> dict[str, Any]:
    """What this rank's log of NCCL says."""
    text = ""
    path = os.environ.get("NCCL_DEBUG_FILE")
    if path and os.path.exists(path):  # noqa: PTH110 - NCCL's name for it
        with open(path, errors="replace") as file:  # noqa: PTH123
            text = file.read()
    return parse(text)
