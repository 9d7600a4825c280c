"""Simulated telemetry of a run: smooth losses, steady steps, memory that rises at the start."""

from __future__ import annotations

import math
import time

from launchers.report.telemetry import DistInfo, Event, Memory, Phase, Step

GIB = 2**30


def events(
    *, steps: int, ranks: int, on_gpus: bool, started: float | None = None, seconds: float = 2.0
) -> list[Event]:
    """Return the events of ``ranks`` ranks of one node in ``steps`` steps of about ``seconds`` each."""
    at = time.time() if started is None else started
    events_made: list[Event] = []
    for rank in range(ranks):
        events_made.append(
            DistInfo(
                rank=rank,
                local_rank=rank,
                world_size=ranks,
                node=0,
                host="node-0",
                device=f"cuda:{rank} NVIDIA A100-SXM4-80GB" if on_gpus else "cpu",
                backend="nccl" if on_gpus else "gloo",
                scheduler="local",
                engine="torchtune",
                pid=1000 + rank,
                at=at,
            )
        )
        events_made.append(Phase(rank=rank, name="train", at=at))
    for number in range(1, steps + 1):
        dt = seconds * (2.5 if number == 1 else 1 + 0.05 * math.sin(number))
        at += dt
        for rank in range(ranks):
            events_made.append(
                Step(
                    rank=rank,
                    step=number,
                    loss=1.2 + 2.0 * math.exp(-number / 30) + 0.05 * math.sin(number * 1.7)
                    if rank == 0
                    else None,
                    lr=2e-5 * min(number / 10, math.cos(number / (steps + 1) * math.pi / 2)),
                    grad_norm=1.0 + 0.3 * math.cos(number),
                    samples=2,
                    tokens=4096,
                    dt=dt,
                    dtf=dt * 0.31,
                    dtb=dt * 0.6,
                    at=at,
                )
            )
            peak = min(31.2, 12 + number * 4) + rank * 0.1
            events_made.append(
                Memory(
                    rank=rank,
                    step=number,
                    allocated_peak=int((peak - 2) * GIB) if on_gpus else None,
                    reserved_peak=int(peak * GIB) if on_gpus else None,
                    rss=int((0.4 + 0.05 * min(number, 3) + 0.01 * rank) * GIB),
                    rss_peak=int((0.56 + 0.01 * rank) * GIB),
                    at=at,
                )
            )
    return events_made
