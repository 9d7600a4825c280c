"""Phase 4: bandwidth from one node to another, without interference of other pairs of the same node.

With NCCL, every GPU of a node sends to its counterpart in a separate process group of two, so a hung pair
affects no other. Without NCCL, the pair uses one plain socket, which has the same path as gloo.
"""

from __future__ import annotations

import math
import time
from typing import Any

from checklist.analysis.busbw import algbw
from checklist.checks.network.sockets import deliver
from checklist.probing.context import Context

_WARM_UP_BYTES = 256 << 10
_LEAST_BYTES = 512 << 10  # smaller messages would measure the burst that a rate limiter allows
_MESSAGE_S = 0.1  # a slow pair uses smaller messages, so that it does not delay the whole round
_LEAST_S = 0.1  # minimum total duration of the messages
_WARM_UPS = 2
_TICK_S = 1e-9  # resolution of the clock


def send(
    context: Context, address: str, port: int, size: int, repetitions: int, connect_s: float, limit_s: float
) -> dict[str, Any]:
    """Send at least ``repetitions`` messages of up to ``size`` bytes over one connection; return times."""
    context.progress.begin()

    def fitting(warm_up_s: float) -> int:
        return min(size, max(_LEAST_BYTES, int(_WARM_UP_BYTES / max(warm_up_s, _TICK_S) * _MESSAGE_S)))

    result = deliver(
        address,
        port,
        first=_WARM_UP_BYTES,
        choose=fitting,
        repetitions=repetitions,
        least_s=_LEAST_S,
        connect_s=connect_s,
        limit_s=limit_s,
    )
    return {
        "seconds": result.seconds[1:],
        "bytes": result.bytes,
        "error": result.error,
        "segments": result.segments,
        "retransmitted": result.retransmitted,
    }


def exchange(
    context: Context,
    store: tuple[str, int],
    group: str,
    first: bool,
    size: int,
    repetitions: int,
    limit_s: float,
) -> dict[str, Any]:
    """Run one end of an NCCL group of two: first one direction, then the other.

    Returns the seconds of each message that this end sends ("sent") and receives ("received").
    """
    import torch
    import torch.distributed as dist

    from checklist.checks.collectives.world_probe import client, end_group, start_group

    end_group(context)
    start_group(context, "nccl", client(store, group, limit_s), 0 if first else 1, 2, limit_s)
    device = torch.device("cuda", context.local_rank)
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    times: dict[bool, list[float]] = {True: [], False: []}
    for sends in (first, not first):
        for repetition in range(_WARM_UPS + repetitions):
            context.progress.begin()
            dist.barrier(device_ids=[context.local_rank])
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            if sends:
                dist.send(payload, 1 if first else 0)
            else:
                dist.recv(payload, 1 if first else 0)
            torch.cuda.synchronize(device)
            if repetition >= _WARM_UPS:
                times[sends].append(time.perf_counter() - start)
    end_group(context)
    return {"sent": times[True], "received": times[False], "bytes": size}


def summary(seconds: list[float], size: int) -> tuple[float, float]:
    """Return GB/s of the fastest message, and the GB/s exceeded by 95 % of the messages."""
    ordered = sorted(seconds)
    slow = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return algbw(size, ordered[0]), algbw(size, slow)
