"""Before the rounds of pairs, in large runs: every node sends to every other, all nodes at once, in seconds.

One communicator of all ranks, point to point: in the turn k each rank sends to the one k places on and
receives from the one k places back, a GPU to its counterpart. Traffic of other pairs is on the same links, so
that a slow pair is a suspect and no more; the best of several passes, each in another order, tells most.
"""

from __future__ import annotations

import random
import time

from checklist.probes.context import Context


def screen(
    context: Context,
    store: tuple[str, int],
    group: str,
    backend: str,
    place: int,
    count: int,
    size: int,
    passes: int,
    limit_s: float,
) -> list[float]:
    """Seconds of the best turn of each distance 1 to ``count`` - 1, as this end saw it: both its messages."""
    import torch
    import torch.distributed as dist

    from checklist.probes.world import client, end_group, start_group, wait

    end_group(context)
    start_group(context, backend, client(store, group, limit_s), place, count, limit_s)
    device = torch.device("cuda", context.local_rank) if backend == "nccl" else torch.device("cpu")
    there, back = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = [float("inf")] * (count - 1)
    order = list(range(1, count))
    for turn in range(passes + 1):  # of the first, connections are made
        random.Random(turn).shuffle(order)
        for distance in order:
            context.progress.begin()
            begin = time.perf_counter()
            ends = [
                dist.P2POp(dist.isend, there, (place + distance) % count),
                dist.P2POp(dist.irecv, back, (place - distance) % count),
            ]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            wait(device)
            if turn:
                best[distance - 1] = min(best[distance - 1], time.perf_counter() - begin)
    end_group(context)
    return best
