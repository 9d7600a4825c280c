"""Time that a rank spends in collectives in each step, which shows the slowest rank.

In synchronous training every rank's step takes as long as the slowest rank's. The other ranks wait in
collectives for the slowest rank, which spends the least time there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
)  # methods of a process group, by their names in torch 2.6 to 2.13


class Waiting:
    """Seconds of a step in collectives: transfer, and waiting for other ranks.

    Python code waits for a collective by ``Work.wait`` (FSDP2, DeepSpeed, TRL and this package). On a CPU the
    duration of that call counts. On a GPU only a stream waits: the time between two CUDA events around the
    collective counts, even if it overlaps with other work. Waits inside C++, as in DTensor's functional
    collectives (the gradients' norm), are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure all collectives of this process from now on."""
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._call_start: Any = None
        self._enabled = dist.is_initialized() and dist.get_world_size() > 1
        if self._enabled:
            dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
            if self._cuda:  # a collective may run on the same stream that waits for it
                for name in _COLLECTIVES:
                    if hasattr(dist.ProcessGroup, name):
                        setattr(
                            dist.ProcessGroup, name, self._recording_start(getattr(dist.ProcessGroup, name))
                        )

    def begin(self) -> None:
        """Start a step."""
        self._spans.clear()

    def seconds(self) -> float | None:
        """Return the seconds of the step so far, once the device has finished; None for a single rank."""
        if not self._enabled:
            return None
        if not self._cuda:
            return float(sum(end - start for start, end in self._spans))
        for _, end in self._spans:
            end.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in self._spans)) / 1000

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(work: Any, *arguments: Any, **options: Any) -> Any:
            start, self._call_start = self._call_start or self._mark(), None
            try:
                return wait(work, *arguments, **options)
            finally:
                self._spans.append((start, self._mark()))

        return timed

    def _recording_start(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a collective to record when it is called, if it is synchronous; else its wait is the start."""

        @functools.wraps(collective)
        def recorded(group: Any, *arguments: Any, **options: Any) -> Any:
            all_arguments = (*arguments, *options.values())
            self._call_start = (
                self._mark()
                if any(getattr(argument, "asyncOp", True) is False for argument in all_arguments)
                else None
            )
            return collective(group, *arguments, **options)

        return recorded

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
        event.record()
        return event
