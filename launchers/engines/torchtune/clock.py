"""Times a recipe's steps from outside: hooks on the model and on the optimizer, no change to the loop."""

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
    """Forward: inside the model. Backward: from a model's output to the next input or to the optimizer.

    The loss, the gradients' reduction and their clipping so count as backward. On a GPU the marks are CUDA
    events and nothing waits for them: the recipes read the loss at the end of each step, so that the events
    have passed when they are read.
    """

    def __init__(self, cuda: bool, on_part: Callable[[str], None]) -> None:
        """``on_part``: called at the start of each part of a step: "data", "forward" and "backward"."""
        self._cuda, self._on_part = cuda, on_part
        self._marks: list[tuple[str, Any]] = []
        self._began = time.perf_counter()
        self.lr: float | None = None  # of the last step: the one that it was made with

    def watch(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Mark each pass and step. For optimizers in the backward pass, which have no separate time,
        the first one's rate is kept.
        """
        # prepend: before a sharded model gathers its weights, which is part of its forward pass
        model.register_forward_pre_hook(lambda *_: self._pass("input", "forward"), prepend=True)
        model.register_forward_hook(lambda *_: self._pass("output", "backward"))

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if len(optimizers) == 1:
                self._mark("optimizer")
            self.lr = float(optimizer.param_groups[0]["lr"])

        optimizers[0].register_step_pre_hook(before_step)

    def restart(self) -> None:
        """A step begins, with its data."""
        self._on_part("data")
        self._marks.clear()
        self._began = time.perf_counter()

    def read(self) -> Times:
        """The times of the optimizer step that ends now."""
        if self._marks and self._marks[-1][0] == "output":  # no optimizer came after the backward pass
            self._mark("end")
        seconds = {"input": 0.0, "output": 0.0}
        for (kind, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[kind] += self._between(start, end)
        step = time.perf_counter() - self._began
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
