"""Timing of a recipe's steps by hooks on the model and the optimizer, without changes to its loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one optimizer step."""

    step: float
    forward: float
    backward: float


class StepClock:
    """Clock of a recipe's steps.

    Forward time is spent inside the model. Backward time lasts from the model's output to its next input or
    to the optimizer, and includes the loss, the reduction of gradients and their clipping. On a GPU the marks
    are CUDA events that cost no synchronization: the recipes read the loss at the end of each step anyway.
    """

    def __init__(self, cuda: bool, on_part: Callable[[str], None]) -> None:
        """Create a clock. ``on_part``: called at the start of each part: "data", "forward", "backward"."""
        self._cuda, self._on_part = cuda, on_part
        self._marks: list[tuple[str, Any]] = []
        self._start = time.perf_counter()
        self.lr: float | None = None  # learning rate of the last step

    def watch(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Register the hooks. Optimizers in the backward pass have no separate time."""
        # prepend: before a sharded model gathers its weights, which is part of its forward pass
        model.register_forward_pre_hook(lambda *_: self._pass("input", "forward"), prepend=True)
        model.register_forward_hook(lambda *_: self._pass("output", "backward"))

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if len(optimizers) == 1:
                self._mark("optimizer")
            self.lr = float(optimizer.param_groups[0]["lr"])

        optimizers[0].register_step_pre_hook(before_step)

    def restart(self) -> None:
        """Start a step, which first reads its data."""
        self._on_part("data")
        self._marks.clear()
        self._start = time.perf_counter()

    def read(self) -> Times:
        """Return the times of the optimizer step that ends now."""
        if self._marks and self._marks[-1][0] == "output":  # no optimizer step followed the backward pass
            self._mark("end")
        seconds = {"input": 0.0, "output": 0.0}
        for (kind, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[kind] += self._between(start, end)
        step = time.perf_counter() - self._start
        return Times(step=step, forward=seconds["input"], backward=seconds["output"])

    def _pass(self, kind: str, part: str) -> None:
        self._mark(kind)
        self._on_part(part)

    def _mark(self, kind: str) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
            event.record()
            self._marks.append((kind, event))
        else:
            self._marks.append((kind, time.perf_counter()))

    def _between(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
