"""Search for the best layout of a job on a number of processes: spread, micro batch, checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from estimator import memory, throughput
from estimator.engines import automatic, fp16
from estimator.engines.setups import setup_of
from estimator.engines.support import unsupported_job
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.job import Job, nearest_multiple
from estimator.plan import Interruptions, Layout, MemoryEstimate
from estimator.planning.candidates import TIE_MARGIN, Candidate, Shortage, complexity
from estimator.planning.interruptions import predict_interruptions
from estimator.planning.ladders import Ladder, Ladders
from estimator.planning.parallelism import Spread, single_process_sharding, spreads
from estimator.planning.places import Place
from estimator.planning.start_up import start_up
from estimator.risk import least_capacity, out_of_memory_risk, verdict_of
from estimator.setup import Setup
from estimator.vocabulary import ENGINES, Device, LaunchedPrecision, Recompute, Sharding, Task

if TYPE_CHECKING:
    from estimator.calibration import Calibration
    from estimator.throughput import MeasuredBandwidth

MAX_LEAN_LAYOUTS = 8  # layouts per number of GPUs that are compared to report the smallest shortage
# Compared where checkpointing is needed: attention and every second product kept, or whole blocks. A choice.
PART_RECOMPUTATIONS: tuple[tuple[Recompute, int], ...] = (
    ("selective", 1),
    ("full", 2),
    ("full", 3),
    ("full", 4),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Measurements that replace general values."""

    calibration: Calibration | None = None  # finished runs, for memory and speed
    bandwidth: MeasuredBandwidth | None = None  # measured bus bandwidth of collectives


class Search:
    """Search for the best layout of one job in one precision on a given number of processes.

    Memory depends on the layout only (and on the GPU if runs on it were measured), so each layout is computed
    once for all instance types.
    """

    def __init__(
        self,
        job: Job,
        precision: LaunchedPrecision,
        device: Device,
        evidence: Evidence | None = None,
        *,
        accepts_tight: bool = False,
    ) -> None:
        self.requested = job
        self.job = job = automatic.with_choices(job, device, precision)
        self.accepts_tight = accepts_tight
        self.ladders = Ladders(job, precision, device)
        self.evidence = evidence or Evidence()
        self._decided_jobs: dict[tuple[Device, LaunchedPrecision, Sharding], Job] = {}
        self._setups: dict[Layout, Setup] = {}
        self._states: dict[tuple[int, int, Spread], int] = {}
        self._estimates: dict[tuple[Layout, str | None], MemoryEstimate] = {}
        self._layout_needs: dict[Layout, tuple[int, tuple[int, int]]] = {}
        self._speeds: dict[tuple[object, ...], throughput.Speed] = {}
        self._has_measurements: dict[str | None, bool] = {}
        self._smallest_needs: dict[tuple[int, int, str | None], int] = {}
        self._total_state_bytes: int | None = None
        self._fitting: dict[tuple[object, ...], list[Layout]] = {}

    def best(
        self, nodes: int, processes: int, capacity: int, gpu: Gpu | None, place: Place | None = None
    ) -> Candidate | None:
        """Return the simplest layout that fits and is within :data:`TIE_MARGIN` of the fastest, or None.

        Tight layouts are considered only if no other fits.
        """
        layouts = self.fitting(nodes, processes, capacity, gpu)
        if not layouts:
            return None
        if not self.accepts_tight:
            layouts = [option for option in layouts if not self.is_tight(option, capacity, gpu)] or layouts
        speeds = [self.speed(layout, gpu, place) for layout in layouts]
        rates = [speed.tokens_per_second or 0.0 for speed in speeds]
        fastest = max(rates)
        near_fastest = [i for i, rate in enumerate(rates) if rate * (1 + TIE_MARGIN) >= fastest]
        # Ladders are sorted without checkpointing first and with the least sharding first, which decides ties
        chosen = min(near_fastest, key=lambda i: (complexity(layouts[i]), -rates[i]))
        layout, speed = self._with_partial_recomputation(
            layouts[chosen], speeds[chosen], capacity, gpu, place
        )
        estimate = self.estimate(layout, gpu).with_capacity(capacity)
        # Hardware of the user is available
        start_up_hours = start_up(place, nodes, self.job.model) if place is not None and place.name else None
        checkpoint = memory.checkpoint_bytes(self.setup(layout)) // nodes
        return Candidate(
            layout=layout,
            memory=estimate,
            gpu=gpu,
            place=place,
            speed=speed,
            start_up=start_up_hours,
            interruptions=self._predict_interruptions(layout, gpu, place, checkpoint),
            checkpoint_bytes=checkpoint,
            evaluated_tokens=self.job.evaluated_sequences * self.job.seq_len,
        )

    def _with_partial_recomputation(
        self, layout: Layout, speed: throughput.Speed, capacity: int, gpu: Gpu | None, place: Place | None
    ) -> tuple[Layout, throughput.Speed]:
        """Return the fastest of a layout and of variants with partial recomputation, with its speed.

        Each kind of partial recomputation uses the largest micro batch that fits, with the same global batch.
        """
        if not layout.activation_checkpointing:
            return layout, speed
        options = [(layout, speed)]
        accepts = self._fits if self.accepts_tight else self._fits_well
        sequences = layout.micro_batch_size * layout.accumulation
        for what, every in self.part_recomputations:
            for size in range(layout.micro_batch_size, 0, -1):
                if sequences % size or (self.job.micro_batch_size or size) != size:
                    continue
                option = replace(
                    layout,
                    micro_batch_size=size,
                    accumulation=sequences // size,
                    recompute=what,
                    recompute_every=every,
                )
                if accepts(option, capacity, gpu):
                    options.append((option, self.speed(option, gpu, place)))
                    break
        return max(options, key=lambda option: option[1].tokens_per_second or 0.0)

    @cached_property
    def part_recomputations(self) -> tuple[tuple[Recompute, int], ...]:
        """Kinds of partial checkpointing that the planner may choose; empty if the user decides."""
        job = self.job
        user_choices = (job.activation_checkpointing, job.recompute, job.recompute_every)
        if user_choices != (None, None, None) or not ENGINES[job.engine].runs_loop:
            return ()
        return tuple(
            (what, every)
            for what, every in PART_RECOMPUTATIONS
            if unsupported_job(replace(job, recompute=what, recompute_every=every)) is None
        )

    def _predict_interruptions(
        self, layout: Layout, gpu: Gpu | None, place: Place | None, checkpoint: int
    ) -> Interruptions | None:
        """Predict the effect of spot interruptions; ``checkpoint``: bytes of one node's checkpoint shard."""
        if place is None or not place.spot:
            return None
        calibration = self.evidence.calibration
        return predict_interruptions(
            place.interruptions,
            nodes=layout.nodes,
            checkpoint_bytes=checkpoint,
            bytes_per_second=calibration.checkpoint_rate(self.job.engine, gpu.name)
            if calibration is not None and gpu is not None
            else None,
            cloud=place.cloud,
            network_gbps=place.network_gbps,
            # A new node replaces the lost one
            restart_hours=start_up(replace(place, free_nodes=0), layout.nodes, self.job.model).hours,
        )

    def divides_batch(self, nodes: int, processes: int) -> bool:
        """Return whether any spread over this many processes divides the global batch."""
        return bool(self.ladders.of(nodes, processes))

    def smallest_shortage(
        self, hardware_name: str, nodes: int, processes: int, capacity: int, gpu: Gpu | None
    ) -> Shortage:
        """Return the shortage of the layout that needs the least memory on ``hardware_name``."""
        key = (nodes, processes, self._measured_on(gpu))
        if key not in self._smallest_needs:
            # Compare the products with the smallest states, then the smallest activations
            lean = sorted(
                self.ladders.of(nodes, processes),
                key=lambda ladder: (
                    self._least_bytes(ladder, gpu),
                    not ladder.checkpointing,
                    -ladder.spread.model_parallel,
                ),
            )
            rungs = [self.ladders.rung(ladder) for ladder in lean[:MAX_LEAN_LAYOUTS]]
            needs = [least_capacity(*self._needs_of(rung, gpu)) for rung in rungs]
            share = -(-self.total_state_bytes(gpu) // (nodes * processes))
            self._smallest_needs[key] = max(min(needs), share)
        return Shortage(hardware=hardware_name, needs=self._smallest_needs[key], has=capacity)

    def estimate(self, layout: Layout, gpu: Gpu | None = None) -> MemoryEstimate:
        """Return the memory of one process in a layout, corrected by earlier runs on that GPU, if any."""
        key = (layout, self._measured_on(gpu))
        if key not in self._estimates:
            estimate = memory.estimate(self.setup(layout))
            if self.evidence.calibration is not None:
                gpu_name = gpu.name if gpu else None
                estimate = self.evidence.calibration.corrected(estimate, self.setup(layout), gpu_name)
            self._estimates[key] = estimate
        return self._estimates[key]

    def setup(self, layout: Layout) -> Setup:
        """Return the training step of a layout."""
        if layout not in self._setups:
            key = (layout.device, layout.precision, layout.sharding)
            if key not in self._decided_jobs:
                self._decided_jobs[key] = automatic.with_choices(self.job, *key)
            self._setups[layout] = setup_of(self._decided_jobs[key], layout)
        return self._setups[layout]

    def total_state_bytes(self, gpu: Gpu | None) -> int:
        """Return the bytes of one copy of the model states, a lower limit for all GPUs together.

        0 (no limit) if earlier runs correct the formulas or states are offloaded.
        """
        if self._is_measured(gpu) or self.job.offload != "none":
            return 0
        if self._total_state_bytes is None:
            self._total_state_bytes = sum(dict(memory.states(self._on_one_gpu())).values())
        return self._total_state_bytes

    def _on_one_gpu(self) -> Setup:
        """Return the training step of the complete model in one process."""
        unsharded = Spread(sharding=single_process_sharding(self.job))
        return setup_of(
            self.job,
            self.ladders.layout(
                nodes=1, processes=1, spread=unsharded, checkpointing=False, micro_batch_size=1, passes=1
            ),
        )

    def _is_measured(self, gpu: Gpu | None) -> bool:
        """Return whether earlier runs on that GPU correct the memory formulas."""
        calibration, name = self.evidence.calibration, gpu.name if gpu else None
        if calibration is None:
            return False
        if name not in self._has_measurements:
            self._has_measurements[name] = calibration.of(self._on_one_gpu(), name) is not None
        return self._has_measurements[name]

    def _measured_on(self, gpu: Gpu | None) -> str | None:
        """Return the GPU's name if runs on it correct the memory formulas, otherwise None."""
        return gpu.name if gpu is not None and self._is_measured(gpu) else None

    def fitting(self, nodes: int, processes: int, capacity: int, gpu: Gpu | None) -> list[Layout]:
        """List the layouts of each kind that fit and are worth comparing."""
        key = (nodes, processes, capacity, self._measured_on(gpu))
        if key not in self._fitting:
            possible = self.total_state_bytes(gpu) <= capacity * nodes * processes
            ladders = self.ladders.of(nodes, processes) if possible else []
            failed: set[Spread] = set()
            layouts: list[Layout] = []
            # With checkpointing first: spreads that do not fit with it do not fit without
            for checkpointing in (True, False):
                group = [ladder for ladder in ladders if ladder.checkpointing == checkpointing]
                layouts = [*self._fitting_layouts(group, capacity, gpu, failed), *layouts]
            self._fitting[key] = layouts
        return self._fitting[key]

    def _fitting_layouts(
        self, ladders: list[Ladder], capacity: int, gpu: Gpu | None, failed: set[Spread]
    ) -> list[Layout]:
        """Return the layouts of these ladders that fit, skipping those that cannot or are not needed."""
        layouts: list[Layout] = []
        fitted: list[Spread] = []
        for ladder in ladders:
            spread = ladder.spread
            if spread in failed or (
                spread.virtual_stages > 1 and replace(spread, virtual_stages=1) in failed
            ):
                failed.add(spread)  # more stages in flight save more activations
                continue
            if any(fit.supersedes(spread, ladder.nodes) for fit in fitted):
                continue
            fitting = self._fitting_of(ladder, capacity, gpu)
            if fitting:
                if self.accepts_tight or not self.is_tight(fitting[0], capacity, gpu):
                    fitted.append(spread)
                layouts += fitting
            else:
                failed.add(spread)
        return layouts

    def _fitting_of(self, ladder: Ladder, capacity: int, gpu: Gpu | None) -> Sequence[Layout]:
        """Return the largest micro batch that fits; if it is tight, all down to the largest that is not.

        For a pipeline all that fit, as fewer idle stages may be faster.
        """
        if self._least_bytes(ladder, gpu) > capacity or not self._fits(
            self.ladders.rung(ladder), capacity, gpu
        ):
            return ()
        largest = self._largest(ladder, lambda layout: self._fits(layout, capacity, gpu))
        first = 0 if ladder.spread.pipeline > 1 else largest
        if first and self.is_tight(self.ladders.rung(ladder, largest), capacity, gpu):
            first = self._largest(ladder, lambda layout: not self.is_tight(layout, capacity, gpu))
        return [self.ladders.rung(ladder, step) for step in range(first, largest + 1)]

    def _largest(self, ladder: Ladder, holds: Callable[[Layout], bool]) -> int:
        """Return the number of rungs, from the smallest, for which a monotonic property holds (bisection)."""
        low, high = 0, len(self.ladders.sizes(ladder))  # memory never decreases with the batch size
        while high - low > 1:
            middle = (low + high) // 2
            if holds(self.ladders.rung(ladder, middle)):
                low = middle
            else:
                high = middle
        return low

    def is_tight(self, layout: Layout, capacity: int, gpu: Gpu | None) -> bool:
        """Return whether a layout that fits has a risk of running out of memory above the limit."""
        return verdict_of(self._risk(layout, capacity, gpu)) != "fits"

    def _fits_well(self, layout: Layout, capacity: int, gpu: Gpu | None) -> bool:
        return not self.is_tight(layout, capacity, gpu)

    def _fits(self, layout: Layout, capacity: int, gpu: Gpu | None) -> bool:
        return verdict_of(self._risk(layout, capacity, gpu)) != "does not fit"

    def _risk(self, layout: Layout, capacity: int, gpu: Gpu | None) -> float:
        return out_of_memory_risk(*self._needs_of(layout, gpu), capacity)

    def _needs_of(self, layout: Layout, gpu: Gpu | None) -> tuple[int, tuple[int, int]]:
        """Return the bytes that one process of a layout needs, and the ends of their range."""
        if self._is_measured(gpu):
            estimate = self.estimate(layout, gpu)
            return estimate.needs_bytes, estimate.needs_range
        if layout not in self._layout_needs:
            needed, _ = memory.needs(self.setup(layout))
            self._layout_needs[layout] = (needed.likely_bytes, (needed.lower_bytes, needed.upper_bytes))
        return self._layout_needs[layout]

    def _least_bytes(self, ladder: Ladder, gpu: Gpu | None) -> int:
        """Return the bytes of the states, a lower limit for all layouts of the same spread."""
        if self._is_measured(gpu):
            return 0  # measured runs may be below the formulas
        spread, world = ladder.spread, ladder.nodes * ladder.processes
        if spread.sharding in ("fsdp", "none"):  # all states, in equal parts
            return self.total_state_bytes(gpu) * spread.replicate // world
        key = (ladder.nodes, ladder.processes, spread)
        if key not in self._states:
            setup = self.setup(self.ladders.rung(ladder))
            self._states[key] = sum(dict(memory.states(setup)).values())
        return self._states[key]

    def speed(
        self, layout: Layout, gpu: Gpu | None, place: Place | None, *, task: Task | None = None
    ) -> throughput.Speed:
        """Predict the speed of a layout; without a place, no network. ``task`` replaces the job's."""
        network = place.network_gbps if place else None
        rdma = place is not None and place.rdma
        key = (layout, gpu.name if gpu else None, task, *((network, rdma) if layout.nodes > 1 else ()))
        if key not in self._speeds:
            setup = self.setup(layout)
            setup = setup if task is None else replace(setup, task=task)
            speed = throughput.speed(
                setup, gpu, network_gbps=network, rdma=rdma, busbw=self.evidence.bandwidth
            )
            if self.evidence.calibration is not None and gpu is not None:
                speed = self.evidence.calibration.corrected_speed(speed, setup, gpu.name)
            self._speeds[key] = speed
        return self._speeds[key]


def precision_of(job: Job, device: Device, gpu: Gpu | None) -> LaunchedPrecision:
    """Return the precision: the user's, otherwise the default for device and engine."""
    if job.precision in ("fp32", fp16.PRECISION):
        return job.precision
    if job.precision == "auto" and device == "cpu":
        return "fp32"
    if job.precision == "auto" and gpu is not None and not gpu.bf16:
        in_fp16 = replace(job, precision=fp16.PRECISION)
        has_fp16 = gpu.peak_flops("fp16") is not None and unsupported_job(in_fp16) is None
        return fp16.PRECISION if has_fp16 else "fp32"
    precisions = ENGINES[job.engine].precisions
    pure = precisions[0] == "bf16" or (job.precision == "bf16" and "bf16" in precisions)
    return "bf16" if pure else "bf16-mixed"


def divides(job: Job, nodes: int, per_node: int) -> bool:
    """Return whether the job's global batch is divisible over these processes."""
    return bool(spreads(job, nodes, per_node))


def indivisible_batch_error(job: Job, world: int, hardware_name: str) -> UserError:
    """Return the error for an indivisible global batch, with the nearest possible one."""
    step = world * (job.micro_batch_size or 1)
    micro = f" with micro batch {job.micro_batch_size}" if job.micro_batch_size else ""
    return UserError(
        f"A batch of {job.global_batch_size} is not divisible over {hardware_name}{micro}.",
        f"Nearest possible batch: {nearest_multiple(job.global_batch_size, step)} (any multiple of {step}).",
    )


def describe_job(job: Job) -> str:
    """Describe a job in brief: model, method, engine, length."""
    return f"{job.model.name} ({job.method}, {job.engine}, {job.model.describe_length(job.seq_len)})"
