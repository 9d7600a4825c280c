"""Recording of a profiled window of a rank's training: the steps in ``settings.profile``.

Each engine reports the start of a step, the start of its phases, and its end. Outside the window the cost is
one comparison; torch's profiler is imported when the window begins. An error of the profiler is reported and
ends the window, but not the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report import trace as traces
from launchers.report.telemetry import Profiled
from launchers.report.window import Window


class Profiler:
    """Profiled window of one rank; does nothing for other ranks and outside the window.

    Parameters
    ----------
    module:
        The trained model, or this rank's shard of it.
    """

    def __init__(self, job: TrainJob, env: RankEnv, reporter: RankReporter, module: Any) -> None:
        profile = job.settings.profile
        self._first, self._last = 0, -1
        if profile.window is not None and env.rank in profile.ranks:
            first, self._last = profile.window
            self._first = max(first, job.start_step + 1)
        self._rank, self._reporter = env.rank, reporter
        self._folder = job.profile_dir
        self._cuda = job.plan.layout.device == "cuda"
        self._tensors = _Tensors(module)
        self._profile: Any = None
        self._open_annotations: list[Any] = []  # outermost first

    def begin(self, step: int) -> None:
        """Start a step."""
        if self._first <= step <= self._last:
            with self._errors_reported(step):
                if step == self._first:
                    self._start()
                if self._profile is not None:
                    self._tensors.begin()
                    self._open_annotation(f"{traces.STEP}{step}")

    def phase(self, name: str) -> None:
        """Start phase ``name``, which lasts until the next phase or the end of the step."""
        if self._open_annotations:
            self._close_annotations(1)
            self._open_annotation(f"{traces.PHASE}{name}")

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Profile a part of a step that ends with the context."""
        if not self._open_annotations:
            yield
            return
        with torch.profiler.record_function(f"{traces.PHASE}{name}"):
            yield

    def end(self) -> None:
        """End the step; work before the next :meth:`begin` belongs to no step."""
        if self._open_annotations:
            self._close_annotations(0)

    def save(self, step: int) -> None:
        """Write and report the window if ``step`` is its last; called after each step."""
        if step == self._last and self._profile is not None:
            self._reporter.phase("profile", step)
            with self._errors_reported(step):
                self._report(self._stop())
            self._reporter.phase("train", step)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._tensors.watch()
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            torch.cuda.synchronize()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        profiler = profile(activities=kinds, profile_memory=True)  # type: ignore[no-untyped-call,unused-ignore]
        profiler.start()  # type: ignore[no-untyped-call,unused-ignore]
        self._profile = profiler

    def _stop(self) -> Path:
        """End the window; returns the trace's file."""
        profiler, self._profile = self._profile, None
        self._tensors.stop()
        if self._cuda:
            torch.cuda.synchronize()
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank-{self._rank:05d}.trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        if self._cuda:
            snapshot = trace.with_name(f"rank-{self._rank:05d}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call,unused-ignore]
            torch.cuda.memory._record_memory_history(enabled=None)
        return trace

    def _report(self, trace: Path) -> None:
        events = traces.read_trace(trace)
        window = Window(
            rank=self._rank,
            first=self._first,
            last=self._last,
            split=traces.split(events),
            memory=self._tensors.categories(traces.allocated(events, gpu=self._cuda), gpu=self._cuda),
            trace=trace.name,
            snapshot=f"rank-{self._rank:05d}.memory.pickle" if self._cuda else None,
        )
        self._reporter.profiled(Profiled(rank=self._rank, step=self._last, window=window.to_dict()))

    def _open_annotation(self, name: str) -> None:
        mark = torch.profiler.record_function(name)
        mark.__enter__()  # type: ignore[no-untyped-call,unused-ignore]
        self._open_annotations.append(mark)

    def _close_annotations(self, keep: int) -> None:
        while len(self._open_annotations) > keep:
            self._open_annotations.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def _errors_reported(self, step: int) -> Iterator[None]:
        """Report an error of the profiler and end the window, but not the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - any error of the profiler
            self._last, self._profile = -1, None
            self._open_annotations.clear()
            self._tensors.stop()
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            self._reporter.profiled(Profiled(rank=self._rank, step=step, problem=problem))


class _Tensors:
    """Bytes of the model's and the optimizer's tensors on this rank, measured at the optimizer's steps.

    Global hooks of torch.optim measure the steps of all optimizers, whichever library calls them.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._hooks: list[Any] = []
        self._weights: dict[int, int] = {}  # bytes by address
        self._masters: dict[int, int] = {}
        self._gradients: dict[int, int] = {}  # in the current step
        self._gradient_bytes = self._old_gradient_bytes = 0  # maximum over the steps; before the window
        self._states: dict[int, int] = {}
        self._old_states: dict[int, int] = {}  # before the window

    def watch(self) -> None:
        """Start recording, until :meth:`stop`."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._weights = _storage_sizes([*self._module.parameters(), *self._module.buffers()])
        self._old_gradient_bytes = sum(
            _storage_sizes(parameter.grad for parameter in self._module.parameters()).values()
        )
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def stop(self) -> None:
        """Stop recording."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """Start a step, whose gradients are new tensors."""
        self._gradients = {}

    def categories(self, allocated: traces.Allocated | None, *, gpu: bool) -> tuple[tuple[str, int], ...]:
        """Return bytes by category; ``allocated``: total at the peak, None if unknown."""
        masters = sum(size for address, size in self._masters.items() if address not in self._weights)
        categories = {
            traces.WEIGHTS: sum(self._weights.values()),
            traces.MASTERS: masters,
            traces.GRADIENTS: self._gradient_bytes,
            traces.STATES: sum(self._states.values()),
        }
        if allocated is not None:
            attributed = sum(categories.values())
            if not gpu:  # the CPU's total excludes what was allocated before the window
                old = sum(size for address, size in self._states.items() if address in self._old_states)
                attributed = categories[traces.STATES] - old
                attributed += max(categories[traces.GRADIENTS] - self._old_gradient_bytes, 0)
            categories[traces.REST] = max(allocated.peak - attributed, 0)
        return tuple((name, size) for name, size in categories.items() if size)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._masters |= _storage_sizes(parameters)
        model_gradients = [parameter.grad for parameter in self._module.parameters()]
        self._gradients |= _storage_sizes([*model_gradients, *(parameter.grad for parameter in parameters)])
        self._gradient_bytes = max(self._gradient_bytes, sum(self._gradients.values()))
        states = _states(optimizer)
        self._old_states |= {address: size for address, size in states.items() if address not in self._states}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._states |= _states(optimizer)


def _states(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return _storage_sizes(value for state in optimizer.state.values() for value in state.values())


def _storage_sizes(values: Iterable[Any]) -> dict[int, int]:
    """Return bytes by address of the tensors' storages; a shared storage counts once."""
    sizes: dict[int, int] = {}
    for value in values:
        tensor = getattr(value, "ds_tensor", value)  # ZeRO-3's shard of a weight
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(
            tensor, "__tensor_flatten__"
        ):  # a DTensor or a quantized tensor, which consists of other tensors
            names, _ = tensor.__tensor_flatten__()
            sizes |= _storage_sizes(getattr(tensor, name) for name in names)
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes
