"""Time of a rank in collectives in each step, which shows who is late, as all steps take equally long.

In synchronous training every rank's step takes as long as the slowest's. Who is slow waits for no one, and
the others wait for it: it is the one that spends the least time in collectives.
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
    """Seconds between a collective and its end, over a step: transfer and the wait for others.

    All that torch's Python side waits for goes through ``Work.wait``, whoever calls it (FSDP2, DeepSpeed,
    TRL, we). On a CPU it returns when the collective has ended, and its time is what is counted. On a GPU
    only a stream waits: two CUDA events around the collective give how long that stream stood, also where it
    overlapped with other work. What C++ waits for itself, as in DTensor's functional collectives (the
    gradients' norm), is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        """Listens from now on to all collectives of this process, to its end."""
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._listens = dist.is_initialized() and dist.get_world_size() > 1
        if self._listens:
            dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
            if self._cuda:  # where a collective may run on the very stream that waits for it
                for name in _COLLECTIVES:
                    if hasattr(dist.ProcessGroup, name):
                        setattr(dist.ProcessGroup, name, self._noted(getattr(dist.ProcessGroup, name)))

    def begin(self) -> None:
        """A step begins; what came before belongs to none."""
        self._spans.clear()

    def seconds(self) -> float | None:
        """Seconds of the step so far; None with a single rank. Call it when the device has finished."""
        if not self._listens:
            return None
        if not self._cuda:
            return float(sum(end - start for start, end in self._spans))
        for _, end in self._spans:
            end.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in self._spans)) / 1000

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(work: Any, *arguments: Any, **options: Any) -> Any:
            start, self._begun = self._begun or self._mark(), None
            try:
                return wait(work, *arguments, **options)
            finally:
                self._spans.append((start, self._mark()))

        return timed

    def _noted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """One that is waited for at once is timed from its call, else from where it is waited for."""

        @functools.wraps(collective)
        def noted(group: Any, *arguments: Any, **options: Any) -> Any:
            all_arguments = (*arguments, *options.values())
            self._begun = (
                self._mark() if any(getattr(o, "asyncOp", True) is False for o in all_arguments) else None
            )
            return collective(group, *arguments, **options)

        return noted

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
        event.record()
        return event
