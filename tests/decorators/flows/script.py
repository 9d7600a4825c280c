"""A training script of a user: all ranks sum their numbers, report steps, and may fail."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from decorators.gpu_profile import current_profile


def train(fails: str, steps: int = 3) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank + 1)])
    for number in range(1, steps + 1):
        dist.all_reduce(total)
        current_profile().report(
            step=number, loss=4.0 / number if rank == 0 else None, tokens=100, seconds=0.1
        )
        if fails == "last" and rank == world - 1 and number == 2:
            raise ValueError("the last rank is broken")
        if fails == "user":
            sys.exit(3)
    if rank == 0:
        print(f"{world} ranks made {int(total.item())}", flush=True)
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
