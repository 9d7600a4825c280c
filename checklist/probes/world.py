"""Phase 3: collectives over all ranks: are their results right, and how long do they take?"""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checklist.probes.context import Worker
from checklist.probes.operations import Unavailable, prepare, wrong_values
from checklist.probes.transport import chosen, parse

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_WARM_UPS = 2
_TOGETHER_CUDA = 4  # operations of one turn: launching one overlaps with the one before, as in training


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

    ``bare``: in turns with the operation and nothing else; seconds of each turn of both.
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
    begin, logged = worker.progress.begin, len(_log())
    try:
        for _ in range(_WARM_UPS if iterations else 1):
            begin()
            work.run()
        _wait(device)
    except Unavailable as error:
        return {"unavailable": str(error)}
    found: dict[str, list[float]] = {"seconds": [], "ours": [], "bare": []}
    if not bare:
        found["seconds"] = _each(work.run, iterations, begin, device)
    elif iterations:
        together = _TOGETHER_CUDA if device.type == "cuda" else 1
        order = random.Random(f"{op} {dtype} {elements}")  # every rank takes the same turns
        for _ in range(max(1, iterations // together)):
            for plain in order.sample((False, True), 2):
                # Together at the start of every turn: no rank waits for what another did in the turn before
                dist.barrier(**_barrier_options(worker))
                _wait(device)
                if plain:
                    found["bare"].append(_plain(work.run, together, device))
                else:
                    each = _each(work.run, together, begin, device)
                    found["seconds"] += each
                    found["ours"].append(sum(each) / together)
    return {**found, "chosen": chosen(_log()[logged:], op), "wrong": wrong_values(work)}


def _each(run: Callable[[], Any], count: int, begin: Callable[[], None], device: Any) -> list[float]:
    """Seconds of each operation. On a GPU between events, so that launching overlaps as in training."""
    if device.type == "cuda":
        marks = [_mark() for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            begin()
            run()
            mark.record()
        _wait(device)
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
    seconds = []
    for _ in range(count):
        begin()  # not timed: after a wait it costs 2 to 4 % of 128 KiB over gloo
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def _plain(run: Callable[[], Any], count: int, device: Any) -> float:
    """Seconds for each operation of a loop with nothing in it but the operation."""
    if device.type == "cuda":
        first, last = _mark(), _mark()
        first.record()
        for _ in range(count):
            run()
        last.record()
        _wait(device)
        return float(first.elapsed_time(last)) / 1000 / count
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def _mark() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _barrier_options(worker: Worker) -> dict[str, Any]:
    return {"device_ids": [worker.local_rank]} if worker.kept.get("backend") == "nccl" else {}


def transport(_: Worker) -> dict[str, Any]:
    """What this rank's log of NCCL says."""
    return parse(_log())


def _log() -> str:
    """NCCL's log of this process; empty where there is none."""
    path = Path(os.environ.get("NCCL_DEBUG_FILE") or os.devnull)
    return path.read_text(errors="replace") if path.exists() else ""
