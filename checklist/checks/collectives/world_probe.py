"""Phase 3: correctness and duration of collectives over all ranks."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checklist.checks.collectives.operations import Unavailable, prepare, wrong_values
from checklist.checks.collectives.transport import algorithm_of, parse
from checklist.probing.context import Context

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

WARM_UPS = 2
_TOGETHER_CUDA = 4  # operations of one turn: launching one overlaps with the one before, as in training


def store(context: Context, address: str) -> int:
    """Serve the rendezvous store of process groups (on rank 0); return its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if "store" not in context.stored:
        context.stored["store"] = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return int(context.stored["store"].port)


def client(where: tuple[str, int], prefix: str, limit_s: float) -> Store:
    """Connect to rank 0's store, with a separate prefix per group."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=limit_s)
    return PrefixStore(prefix, TCPStore(where[0], where[1], is_master=False, timeout=limit))


def join(
    context: Context, where: tuple[str, int], group: str, backend: str, world: int, limit_s: float
) -> int:
    """Create the group of all ranks; return its size."""
    import torch.distributed as dist

    start_group(context, backend, client(where, group, limit_s), context.rank, world, limit_s)
    context.progress.begin()
    dist.barrier(**_barrier_options(context))
    return dist.get_world_size()


def start_group(context: Context, backend: str, store: Store, rank: int, world: int, limit_s: float) -> None:
    """Join a group of ``world`` ranks as ``rank``."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(context.local_rank)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        # Exceeds the node agent's limit, so that it identifies a hung rank before the others time out.
        timeout=datetime.timedelta(seconds=2 * limit_s),
    )
    context.stored["backend"] = backend


def end_group(context: Context) -> None:
    """Destroy this rank's process group, if any."""
    if context.stored.pop("backend", None):
        import torch.distributed as dist

        dist.destroy_process_group()


def leave(context: Context) -> None:
    """Run :func:`end_group` as a worker command."""
    end_group(context)


def correct(context: Context, op: str, dtype: str, elements: int) -> dict[str, Any]:
    """Run ``op`` once with values that differ by rank and position; return the number of wrong values."""
    return _measure(context, op, dtype, elements, iterations=0)


def timed(
    context: Context, op: str, dtype: str, elements: int, iterations: int, paced: bool
) -> dict[str, Any]:
    """Run ``op`` repeatedly; return the seconds of each run and the wrong values of the last.

    ``paced``: start each turn on all ranks together, so no rank waits for earlier work of another.
    """
    return _measure(context, op, dtype, elements, iterations, paced=paced)


def _measure(
    context: Context, op: str, dtype: str, elements: int, iterations: int, *, paced: bool = False
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backend = context.stored["backend"]
    device = torch.device("cuda", context.local_rank) if backend == "nccl" else torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    operation = prepare(op, getattr(torch, dtype), elements, rank, world, device)
    start, log_offset = context.progress.begin, len(_log())
    try:
        for _ in range(WARM_UPS if iterations else 1):
            start()
            operation.run()
        wait(device)
    except Unavailable as error:
        return {"unavailable": str(error)}
    seconds: list[float] = []
    if paced and iterations:
        count = operations_of_turn(device)
        for _ in range(max(1, iterations // count)):
            dist.barrier(**_barrier_options(context))
            wait(device)
            seconds += seconds_of_each(operation.run, count, start, device)
    else:
        seconds = seconds_of_each(operation.run, iterations, start, device)
    return {
        "seconds": seconds,
        "chosen": algorithm_of(_log()[log_offset:], op),
        "wrong": wrong_values(operation),
    }


def operations_of_turn(device: torch.device) -> int:
    """Return the operations per barrier; several on a GPU, where a launch overlaps the previous operation."""
    return _TOGETHER_CUDA if device.type == "cuda" else 1


def seconds_of_each(
    run: Callable[[], Any], count: int, time_origin: Callable[[], None], device: torch.device
) -> list[float]:
    """Measure the seconds of each operation; on a GPU by events, so launches overlap as in training."""
    if device.type == "cuda":
        events = [mark() for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            time_origin()
            run()
            event.record()
        wait(device)
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]
    seconds = []
    for _ in range(count):
        time_origin()  # not timed: after a wait it costs 2 to 4 % of 128 KiB over gloo
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def mark() -> Any:
    """Create a CUDA event for timing."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    """Synchronize with a GPU; no-op on CPUs."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _barrier_options(context: Context) -> dict[str, Any]:
    return {"device_ids": [context.local_rank]} if context.stored.get("backend") == "nccl" else {}


def transport(_: Context) -> dict[str, Any]:
    """Return the fields of ``Transport`` from NCCL's log on this rank."""
    return parse(_log())


def _log() -> str:
    """Read this process's NCCL log; empty if there is none."""
    path = Path(os.environ.get("NCCL_DEBUG_FILE") or os.devnull)
    return path.read_text(errors="replace") if path.exists() else ""
