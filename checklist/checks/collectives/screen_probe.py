"""Screening before the rounds of pairs in large runs: all nodes send to all others at once, within seconds.

Uses one communicator of all ranks, point to point: in turn k each rank sends to its counterpart k nodes ahead
and receives from the one k nodes behind. Other pairs share the links, so a slow pair is only a suspect. The
best of several passes in different orders is the most informative.
"""

from __future__ import annotations

import random
import time

from checklist.probing.context import Context


def screen(
    context: Context,
    store: tuple[str, int],
    group: str,
    backend: str,
    position: int,
    count: int,
    size: int,
    passes: int,
    limit_s: float,
) -> list[float]:
    """Return this end's best seconds (both messages) for each distance 1 to ``count`` - 1."""
    import torch
    import torch.distributed as dist

    from checklist.checks.collectives.world_probe import client, end_group, start_group, wait

    end_group(context)
    start_group(context, backend, client(store, group, limit_s), position, count, limit_s)
    device = torch.device("cuda", context.local_rank) if backend == "nccl" else torch.device("cpu")
    outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = [float("inf")] * (count - 1)
    order = list(range(1, count))
    for index in range(passes + 1):  # the first pass sets up connections
        random.Random(index).shuffle(order)
        for distance in order:
            context.progress.begin()
            start = time.perf_counter()
            transfers = [
                dist.P2POp(dist.isend, outgoing, (position + distance) % count),
                dist.P2POp(dist.irecv, incoming, (position - distance) % count),
            ]
            for transfer in dist.batch_isend_irecv(transfers):
                transfer.wait()
            wait(device)
            if index:
                best[distance - 1] = min(best[distance - 1], time.perf_counter() - start)
    end_group(context)
    return best
