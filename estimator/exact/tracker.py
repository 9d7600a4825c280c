"""Counts the live bytes of a traced step, by what they are and by the moment of the step.

Imports torch: only the tracing process may load this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest import mock

import torch
from torch._guards import active_fake_mode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
SUMS = (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor)


class Part(str, Enum):
    """Purpose of a storage; the values are categories of ``estimator.memory``, and buffers."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    COMMUNICATION = "communication buffers"
    OPTIMIZER_TEMPORARIES = "optimizer temporaries"
    NF4 = "quantisation overhead"
    BUFFERS = "buffers"  # tables of rotary positions


class StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's MemTracker, which follows storages from allocation to release, with parts of our own.

    A new storage gets the part that ``part`` holds at that time; ``mark`` says what it is once that is
    known. For each moment the largest total is kept with its parts. MemTracker's statistics of modules are
    left out: they refuse frozen parameters and take a hundred times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ref_class = Part  # type: ignore[assignment]
        self.part = Part.ACTIVATIONS
        self.head_shapes: set[tuple[int, ...]] = set()  # of the trained head's weight
        self.peaks: dict[str, dict[str, int]] = {}
        self._highest: dict[str, int] = {}
        self._moment = "before"
        self._working_out_shapes = False

    @property
    def moment(self) -> str:
        """The part of the step that runs now: "forward", "loss", "backward, ...", "optimizer"."""
        return self._moment

    @moment.setter
    def moment(self, name: str) -> None:
        self._moment = name
        self._note_peak()

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Inside this context new storages are counted as ``part``."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def mark(self, tensor: torch.Tensor | None, part: Part) -> None:
        """Say what a tensor's storage is for, whether the tracker knows the storage already or not."""
        if tensor is not None:
            self._update_and_maybe_create_winfos(tensor, part)  # type: ignore[arg-type]

    def now(self) -> dict[str, int]:
        """Bytes that are alive now, by part."""
        snapshot: dict[Any, int] = self._curr_mem_snap.get(CPU, {})
        return {part.value: snapshot[part] for part in Part if snapshot.get(part)}

    def forget_peaks(self) -> None:
        """Start the search for peaks again; live storages stay known."""
        self.peaks.clear()
        self._highest.clear()

    def __enter__(self) -> StepTracker:
        if self._depth == 0:
            self._fake_mode_on_entry = active_fake_mode()
            self._track_resize()  # FSDP2 frees gathered weights by resizing their storages
            self._follow_shapes()
        self._depth += 1
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore_resize()
            self._shapes.stop()
        TorchDispatchMode.__exit__(self, *args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most calls under fake mode, and nothing is allocated
            return func(*args, **kwargs or {})
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into operations on local tensors, which come here
        if func is torch.ops._c10d_functional.wait_tensor.default:
            result = args[0]  # the fake kernel makes a copy, the real one does not
        else:
            result = func(*args, **kwargs or {})
        # DTensor works out shapes on whole tensors, under a fake mode of its own or (torch 2.13) under the
        # one that is there: nothing of that is ever allocated
        if active_fake_mode() is self._fake_mode_on_entry and not self._working_out_shapes:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._track(self._part_of(func, tensor), tensor)  # type: ignore[arg-type]
            self._note_peak()
        return result

    def _follow_shapes(self) -> None:
        """Know when DTensor works out the shapes of an operation's results."""
        name = "_propagate_tensor_meta_non_cached"
        work_out = getattr(ShardingPropagator, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._working_out_shapes = True
            try:
                return work_out(*args, **kwargs)
            finally:
                self._working_out_shapes = False

        self._shapes = mock.patch.object(ShardingPropagator, name, noted)
        self._shapes.start()

    def _part_of(self, func: Any, tensor: torch.Tensor) -> Part:
        """The head's gradient is made, and added up chunk by chunk, before any hook hears of it."""
        backward = self.part is Part.LOGITS and self._moment.startswith("backward")
        if backward and func in SUMS and tuple(tensor.shape) in self.head_shapes:
            return Part.GRADIENTS
        return self.part

    def _note_peak(self) -> None:
        snapshot: dict[Any, int] = self._curr_mem_snap.get(CPU, {})
        total = snapshot.get("Total", 0)
        if total > self._highest.get(self._moment, -1):
            self._highest[self._moment] = total
            self.peaks[self._moment] = {part.value: snapshot[part] for part in Part if snapshot.get(part)}
