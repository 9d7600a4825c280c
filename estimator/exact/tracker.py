"""Tracker of the live bytes of a traced step, by category and phase.

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
    """Purpose of a storage: a category of ``estimator.memory``, or buffers."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    COMMUNICATION = "communication buffers"
    OPTIMIZER_TEMPORARIES = "optimizer temporaries"
    NF4 = "quantization overhead"
    BUFFERS = "buffers"  # tables of rotary positions


class StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's MemTracker, which follows storages from allocation to release, with custom categories.

    A new storage gets the category in ``part`` at that time; ``mark`` sets it later. For each phase, the
    largest total is recorded with its categories. MemTracker's statistics per module are disabled: they fail
    on frozen parameters and take a hundred times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ref_class = Part  # type: ignore[assignment]
        self.part = Part.ACTIVATIONS
        self.head_shapes: set[tuple[int, ...]] = set()  # of the trained head's weight
        self.peaks: dict[str, dict[str, int]] = {}
        self._highest: dict[str, int] = {}
        self._moment = "before"
        self._propagating_shapes = False

    @property
    def moment(self) -> str:
        """Current phase of the step: "forward", "loss", "backward, ...", "optimizer"."""
        return self._moment

    @moment.setter
    def moment(self, name: str) -> None:
        self._moment = name
        self._note_peak()

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Context in which new storages are counted as ``part``."""
        previous, self.part = self.part, part
        try:
            yield
        finally:
            self.part = previous

    def mark(self, tensor: torch.Tensor | None, part: Part) -> None:
        """Set the category of a tensor's storage, tracked or not."""
        if tensor is not None:
            self._update_and_maybe_create_winfos(tensor, part)  # type: ignore[arg-type]

    def now(self) -> dict[str, int]:
        """Return the live bytes, by category."""
        snapshot: dict[Any, int] = self._curr_mem_snap.get(CPU, {})
        return {part.value: snapshot[part] for part in Part if snapshot.get(part)}

    def reset_peaks(self) -> None:
        """Reset the recorded peaks; live storages stay tracked."""
        self.peaks.clear()
        self._highest.clear()

    def __enter__(self) -> StepTracker:
        if self._depth == 0:
            self._fake_mode_on_entry = active_fake_mode()
            self._track_resize()  # FSDP2 frees gathered weights by resizing their storages
            self._detect_shape_propagation()
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
        if func is torch.ops.prim.device.default:  # most frequent call in fake mode, without allocation
            return func(*args, **kwargs or {})
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches to operations on local tensors, which are tracked
        if func is torch.ops._c10d_functional.wait_tensor.default:
            result = args[0]  # the fake kernel copies, the real one does not
        else:
            result = func(*args, **kwargs or {})
        # DTensor propagates shapes on full tensors, in a separate fake mode or (torch 2.13) in the active
        # one: these are never allocated
        if active_fake_mode() is self._fake_mode_on_entry and not self._propagating_shapes:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self._track(self._part_of(func, tensor), tensor)  # type: ignore[arg-type]
            self._note_peak()
        return result

    def _detect_shape_propagation(self) -> None:
        """Detect shape propagation of DTensor."""
        name = "_propagate_tensor_meta_non_cached"
        original = getattr(ShardingPropagator, name)

        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._propagating_shapes = True
            try:
                return original(*args, **kwargs)
            finally:
                self._propagating_shapes = False

        self._shapes = mock.patch.object(ShardingPropagator, name, propagate)
        self._shapes.start()

    def _part_of(self, func: Any, tensor: torch.Tensor) -> Part:
        """Return the category of a new tensor. The gradient of the head is allocated before any hook runs."""
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
