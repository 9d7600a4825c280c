"""Plan of a job: resource request, layout of its processes, predictions, and reasons.

A Plan is made once, before the run, and is passed on to the decorators that turn it into a resource request,
to the launchers that run it, and to the card that compares it with measurements. It is frozen, and converts
to JSON and back without loss.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from estimator.formatting import GIB as GIB
from estimator.formatting import MIB as MIB
from estimator.risk import Verdict, out_of_memory_risk, verdict_of
from estimator.vocabulary import (
    METHODS,
    Device,
    LaunchedMethod,
    LaunchedPrecision,
    LaunchedSchedule,
    Offload,
    Recompute,
    Sharding,
    TargetKind,
)

SCHEMA_VERSION = 4

# Categories of a MemoryEstimate other than tensors
RUNTIME = "runtime"
ALLOCATOR = "allocator"

Counter = Literal["device", "reserved", "allocated", "resident"]
"""Source of a memory counter: NVML, minus earlier usage; torch.cuda.max_memory_reserved and
max_memory_allocated; on a CPU the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Highest value that a memory counter should show, in bytes."""

    likely_bytes: int
    upper_bytes: int | None  # None: no range is known
    categories: tuple[tuple[str, int], ...]  # of ``likely_bytes``


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Peak memory of one process (one GPU; on a CPU, one process's host memory), in bytes: two figures.

    *Needs*: the minimum with which the run succeeds; decides whether it fits and what is requested. *Shows*:
    the value in nvidia-smi on a GPU with enough memory, which is higher, as PyTorch's allocator releases
    cached blocks only when memory is short. Other counters: :meth:`counted`.

    ``categories`` are the parts of the needed memory at the peak, in drawing order. Their sum is
    ``needs_bytes``.
    """

    categories: tuple[tuple[str, int], ...]
    needs_range: tuple[int, int]
    shows_bytes: int  # of the complete process
    shows_range: tuple[int, int]
    capacity_bytes: int | None  # memory that one GPU (or, on a CPU, this process's share) offers
    host_bytes: int  # host memory of one whole node
    needs_basis: str  # source of the range
    shows_basis: str
    uncorrected: MemoryEstimate | None = None  # estimate before the correction by earlier runs
    formulas: str = ""  # calibration.formulas() at that time; empty: not recorded
    outside_bytes: int | None = None  # part of the shown memory outside PyTorch's allocator; None: unknown

    @property
    def needs_bytes(self) -> int:
        """Sum of the categories."""
        return sum(value for _, value in self.categories)

    @property
    def live_bytes(self) -> int:
        """Live tensors at the peak, as counted by ``torch.cuda.max_memory_allocated``."""
        return sum(value for _, value in self._tensors)

    @property
    def shown_categories(self) -> tuple[tuple[str, int], ...]:
        """Categories of tensors, runtime, and the rest as allocator; their sum is ``shows_bytes``.

        If less is shown than needed (on a CPU), only the allocator's part is reduced.
        """
        outside = self.outside_bytes
        runtime = dict(self.categories).get(RUNTIME, 0) if outside is None else outside
        categories = [*self._tensors, (RUNTIME, runtime)] if runtime else [*self._tensors]
        cached = self.shows_bytes - sum(value for _, value in categories)
        return (*categories, (ALLOCATOR, cached)) if cached > 0 else tuple(categories)

    def counted(self, counter: Counter) -> Counted | None:
        """Return the expected value of ``counter``; None if the estimate has none.

        A device shows more than torch has reserved: also CUDA's context and NCCL's buffers.
        """
        categories, outside = self.shown_categories, self.outside_bytes
        if counter == "allocated":
            return Counted(likely_bytes=self.live_bytes, upper_bytes=None, categories=self._tensors)
        if counter != "reserved":
            upper = self.shows_range[1]
            return Counted(likely_bytes=self.shows_bytes, upper_bytes=upper, categories=categories)
        if outside is None:
            return None
        return Counted(
            likely_bytes=self.shows_bytes - outside,
            upper_bytes=self.shows_range[1] - outside,
            categories=tuple((name, value) for name, value in categories if name != RUNTIME),
        )

    @property
    def _tensors(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, value) for name, value in self.categories if name not in (RUNTIME, ALLOCATOR))

    def with_capacity(self, capacity_bytes: int | None) -> MemoryEstimate:
        """Return the estimate for a GPU of this capacity, with shown memory limited to it."""
        if (
            capacity_bytes is None or self.outside_bytes is None
        ):  # a CPU's process can be larger than its share
            return dataclasses.replace(self, capacity_bytes=capacity_bytes)
        lower, upper = self.shows_range
        return dataclasses.replace(
            self,
            capacity_bytes=capacity_bytes,
            shows_bytes=min(self.shows_bytes, capacity_bytes),
            shows_range=(min(lower, capacity_bytes), min(upper, capacity_bytes)),
        )

    @property
    def out_of_memory_risk(self) -> float | None:
        """Probability that it needs more than the capacity; None if the capacity is unknown."""
        if self.capacity_bytes is None:
            return None
        return out_of_memory_risk(self.needs_bytes, self.needs_range, self.capacity_bytes)

    @property
    def headroom_bytes(self) -> int | None:
        """Capacity minus need, negative if it does not fit; None if the capacity is unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.needs_bytes

    @property
    def verdict(self) -> Verdict | None:
        """Verdict of the out-of-memory risk; None if the capacity is unknown."""
        risk = self.out_of_memory_risk
        return None if risk is None else verdict_of(risk)

    @property
    def fits(self) -> bool | None:
        """Whether it fits, tight or not; None if the capacity is unknown."""
        return None if self.verdict is None else self.verdict != "does not fit"

    @property
    def tight(self) -> bool:
        """Whether it fits, but with a higher risk than the planner accepts by default."""
        return self.verdict == "tight"

    def describe(self) -> str:
        """Need, capacity and verdict: "41.0 of 48.0 GiB: fits, 14 % to spare"."""
        if self.capacity_bytes is None or self.headroom_bytes is None:
            return f"{self.needs_bytes / GIB:.1f} GiB"
        text = f"{self.needs_bytes / GIB:.1f} of {self.capacity_bytes / GIB:.1f} GiB: {self.verdict}"
        if self.headroom_bytes < 0:
            return f"{text}, {-self.headroom_bytes / GIB:.1f} GiB short"
        text += f", {100 * self.headroom_bytes / self.capacity_bytes:.0f} % to spare"
        if self.verdict == "fits":
            return text
        return f"{text}, {100 * (self.out_of_memory_risk or 0.0):.0f} % risk of running out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Resource request; sizes and counts are per node unless stated otherwise."""

    nodes: int
    gpus_per_node: int  # 0: the job runs on CPUs
    gpu_type: str | None  # a name of the GPU table
    cpu: int  # cores
    memory_mib: int
    shared_memory_mib: int
    disk_mib: int
    instance_type: str | None = None
    cloud: str | None = None
    spot: bool = False  # on nodes that may be interrupted at any time
    gpu_assumed: bool = False  # GPU named by the user, not by a node label
    node_labels: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have, as (name, value). Backends without node selectors ignore them."""

    @property
    def gpus(self) -> str:
        """GPUs of one node as text: "8x H100 SXM", or "no GPU"."""
        return f"{self.gpus_per_node}x {self.gpu_type or 'GPU'}" if self.gpus_per_node else "no GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Distribution of the job over processes. ``world_size`` = nodes * processes_per_node."""

    device: Device
    nodes: int
    processes_per_node: int
    sharding: Sharding
    micro_batch_size: int  # sequences for each process and forward pass
    accumulation: int  # forward passes for each optimizer step
    seq_len: int
    activation_checkpointing: bool
    precision: LaunchedPrecision
    optimizer: str
    offload: Offload = "none"
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1  # model chunks of each pipeline stage
    schedule: LaunchedSchedule = "none"
    expert_parallel: int = 1  # reuses the processes of the other kinds
    replicate: int = 1  # groups that each hold the sharded states once (HYBRID_SHARD)
    optimizer_in_backward: bool = False  # apply and free each gradient immediately
    recompute: Recompute = "full"  # part of a block that activation checkpointing recomputes
    recompute_every: int = 1  # one of this many blocks is recomputed

    @property
    def checkpointing(self) -> str:
        """Description of activation checkpointing: "off", "full", "selective", "full, 1 of 2 blocks"."""
        if not self.activation_checkpointing:
            return "off"
        part = f", 1 of {self.recompute_every} blocks" if self.recompute_every > 1 else ""
        return self.recompute + part

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes_per_node

    @property
    def data_parallel(self) -> int:
        """Number of processes, or of groups of model-parallel processes, with different sequences."""
        return self.world_size // (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def global_batch_size(self) -> int:
        """Sequences for each optimizer step."""
        return self.micro_batch_size * self.accumulation * self.data_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """Minutes from the request of machines to the first step; all nodes start at the same time."""

    machine_minutes: float
    image_minutes: float
    weights_minutes: float

    @property
    def hours(self) -> float:
        """Hours of the complete start-up."""
        return (self.machine_minutes + self.image_minutes + self.weights_minutes) / 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """Expected effect of spot interruptions on a run (estimator.planning.interruptions)."""

    nodes: int
    per_node_hour: float  # interruptions per node and hour
    source: str  # source of the rate
    checkpoint_seconds: float  # pause of training per checkpoint
    checkpoint_basis: str
    store_seconds: float  # time to upload a checkpoint to shared storage, during training
    restart_seconds: float  # from the loss of a node to the first step
    interval_seconds: float  # training time between checkpoints
    steps: int | None = None  # interval in optimizer steps; None: the speed is unknown
    expected: float | None = None  # number of interruptions in the complete run
    lost_hours: float | None = None  # hours of the run without progress
    ends_well: float | None = None  # probability of at most as many interruptions as the run tolerates


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted speed, time and price of the run. None: unknown.

    ``hours`` and ``usd`` include the start-up if known, evaluations during training, and on spot nodes the
    expected losses by interruptions.
    """

    memory: MemoryEstimate
    flops_per_token: float  # model FLOPs, forward and backward, without recomputation
    peak_flops_per_gpu: float | None  # dense, of the precision used
    tokens_per_second: float | None  # over all processes
    hours: float | None
    usd_per_hour: float | None  # of all nodes
    usd: float | None
    throughput_basis: str = ""
    tokens: int | None = None  # of the complete job
    price_kind: Literal["on demand", "spot"] = "on demand"
    price_source: str = ""
    mfu: float | None = None  # model FLOP/s over the dense bf16 peak
    tokens_per_second_range: tuple[float, float] | None = None
    start_up: StartUp | None = None  # None: the machines are available
    step_parts: tuple[tuple[str, float], ...] = ()
    """Seconds of one optimizer step by part: throughput.Parts.kinds. Empty: unknown."""
    step_kernels: tuple[tuple[str, float], ...] = ()
    """Seconds of "forward and backward" among ``step_parts``, by kernels: throughput.Parts.of_compute."""
    evaluation_hours: float = 0.0  # maximum part of `hours` for evaluations during training
    low_availability: str = ""  # reason for low on-demand availability; "": usually available
    checkpoint_bytes: int | None = None  # of one node
    interruptions: Interruptions | None = None  # None: no spot nodes, or unknown rate
    step_collectives: tuple[tuple[str, float], ...] = ()
    """Seconds of its collectives by kind, including overlapped ones: throughput.Parts.collectives."""
    uncorrected_tokens_per_second: float | None = None  # before the correction by earlier runs; None: none
    speed_formulas: str = ""  # calibration.speed.formulas() at that time; empty: not recorded

    @property
    def hours_range(self) -> tuple[float, float] | None:
        """Hours at the fast and at the slow end of ``tokens_per_second_range``, with the same start-up."""
        if self.hours is None or not self.tokens_per_second or self.tokens_per_second_range is None:
            return None
        start = self.start_up.hours if self.start_up is not None else 0.0
        low, high = (
            start + (self.hours - start) * self.tokens_per_second / rate
            for rate in reversed(self.tokens_per_second_range)
        )
        return low, high

    @property
    def usd_range(self) -> tuple[float, float] | None:
        """Price of the complete job over ``hours_range``."""
        if self.hours_range is None or self.usd is None or not self.hours:
            return None
        low, high = (self.usd * hours / self.hours for hours in self.hours_range)
        return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A step besides training with separate size and price. None: unknown.

    Ranges are (fast, slow); hours include the start-up if known.
    """

    name: Literal["generate", "score", "compare"]
    request: Request  # of one node
    nodes: int = 1  # independent tasks
    hours: tuple[float, float] | None = None
    usd: tuple[float, float] | None = None  # of all nodes
    basis: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Generation of the answers that a model is trained on, and the stages before it."""

    batch_sequences: int  # answers that are generated together, at most
    batch_tokens: int  # maximum tokens of a batch, including padding and new tokens
    prompt_tokens: int  # the longest prompt that this was planned for
    fits: bool | None  # whether all answers to one prompt fit at maximum length; None: unknown
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage | None:
        """Return the stage of that name."""
        return next((stage for stage in self.stages if stage.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A planned value that was replaced, the new value, and its source."""

    name: str
    planned: str
    used: str
    given_by: str  # "--gpus", "@resources in the flow", "--with kubernetes:gpu="


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Starting point of a learning rate search: a published run's rate, scaled to this batch by a rule."""

    rule: Literal["sqrt", "linear"]
    value: float
    source: str  # source of the rule
    run: str  # published run that the rate is scaled from


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of one job: request, layout, prediction and reasons."""

    model: str
    parameters: int
    method: LaunchedMethod
    engine: str
    target: TargetKind
    request: Request
    layout: Layout
    prediction: Prediction
    why: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    rejected: tuple[str, ...] = ()  # nearest alternatives, with the reason for each rejection
    learning_rates: tuple[LearningRate, ...] = ()  # hints
    task: str = "sft"
    settings: tuple[tuple[str, str], ...] | None = None
    """Settings that the plan was made for, where they differ from their defaults. None: not recorded."""
    prepare: Request | None = None  # of the preparation of weights and data; None: same as ``request``
    evaluate: Request | None = None  # of the evaluation; None: same as ``request``
    generation: Generation | None = None  # of rejection sampling
    packing: bool = False  # several rows are packed into one sequence
    liger: bool = False  # Liger-Kernel's kernels
    compile: bool = False  # torch.compile
    planned_only: str | None = None  # why this package cannot launch the plan, as a clause; None: it can
    schema: int = field(default=SCHEMA_VERSION)

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained and the base model is frozen."""
        return METHODS[self.method].adapters

    @property
    def length(self) -> str:
        """Size of a row as text: "2048 tokens", or "512 x 512 pixels" for images."""
        side = dict(self.settings or ()).get("images.resolution")
        return f"{self.layout.seq_len} tokens" if side is None else f"{side} x {side} pixels"

    @property
    def accelerations(self) -> tuple[str, ...]:
        """Names of the enabled accelerations: packing, Liger kernels, torch.compile."""
        choices = {"packed": self.packing, "Liger": self.liger, "compiled": self.compile}
        return tuple(word for word, on in choices.items() if on)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values (tuples stay tuples), with risk, headroom and verdict of the memory."""
        values = dataclasses.asdict(self)
        memory = self.prediction.memory
        values["prediction"]["memory"] |= {
            "out_of_memory_risk": memory.out_of_memory_risk,
            "headroom_bytes": memory.headroom_bytes,
            "verdict": memory.verdict,
        }
        return values

    def to_json(self) -> str:
        """Return one line of JSON, keys sorted; :meth:`from_json` gives back an equal Plan."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse the output of :meth:`to_json`; raises ValueError for another schema or a wrong field."""
        from pydantic import ValidationError

        try:
            plan: Plan = _reader().validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"of the plan, {field} is wrong: {first['msg']}") from None
        if plan.schema != SCHEMA_VERSION:
            raise ValueError(f"the plan has schema {plan.schema}; this version reads {SCHEMA_VERSION}")
        return plan

    def to_transformers(self, *, sft: bool = False) -> dict[str, Any]:
        """Return arguments for ``transformers.TrainingArguments``, with ``sft`` for ``trl.SFTConfig``."""
        from estimator import trainer_arguments

        return trainer_arguments.to_transformers(self.layout, sft=sft)

    def to_deepspeed(self) -> dict[str, Any]:
        """Return a DeepSpeed configuration with the plan's ZeRO stage, offload, batch and precision."""
        from estimator import trainer_arguments

        return trainer_arguments.to_deepspeed(self.layout)

    def to_accelerate(self) -> dict[str, Any]:
        """Return keyword arguments for ``accelerate.Accelerator`` and its plugins."""
        from estimator import trainer_arguments

        return trainer_arguments.to_accelerate(self.layout)

    def to_lightning(self) -> dict[str, Any]:
        """Return keyword arguments for ``lightning.Trainer``."""
        from estimator import trainer_arguments

        return trainer_arguments.to_lightning(self.layout)

    def with_override(self, override: Override, **request: Any) -> Plan:
        """Return the plan with these fields of its request replaced, and the override recorded."""
        return dataclasses.replace(
            self, request=dataclasses.replace(self.request, **request), overrides=(*self.overrides, override)
        )


@lru_cache(maxsize=1)
def _reader() -> Any:
    from pydantic import TypeAdapter  # 0.1 s to import; most callers never read a Plan back

    return TypeAdapter(Plan)
