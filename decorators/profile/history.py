"""History: the telemetry of one node's ranks, put together step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decorators.profile.measured import Measured
from decorators.profile.sampling import GpusSample, HostSample
from estimator.plan import Plan
from launchers.evaluate import EvaluationResult
from launchers.harness.result import HarnessResult
from launchers.report.drawn import DrawnPictures
from launchers.report.evaluations import HeldOutLoss
from launchers.report.metrics import median, speed_of, time_left
from launchers.report.stragglers import late_lines
from launchers.report.telemetry import (
    DistInfo,
    Drawn,
    Evaluated,
    Event,
    Memory,
    Pace,
    Phase,
    Profiled,
    Step,
    Straggling,
)
from launchers.report.window import Window
from launchers.trial import TrialResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One optimizer step of the run. Seconds; None is: not known."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    dt: float  # rank 0's, as the terminal shows it; the slowest rank's on a node that has no rank 0
    dtf: float | None
    dtb: float | None
    tokens_per_second: float  # over all processes
    mfu: float | None
    at: float
    task: dict[str, float] = field(default_factory=dict)  # the task's own figures by name


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """One rank's row of the card; None: not reported yet."""

    rank: int
    info: DistInfo | None
    phase: str
    memory: Memory | None
    tokens_per_second: float | None  # its own, median of its steps but the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One hyper-parameter, in words."""

    name: str
    value: str
    default: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """A step's record so far. Times are seconds since the epoch."""

    plan: Plan | None
    measured: Measured
    steps: tuple[StepRow, ...]
    ranks: tuple[RankRow, ...]
    memory: tuple[Memory, ...]
    gpu_samples: tuple[GpusSample, ...]
    host_samples: tuple[HostSample, ...]
    total_steps: int | None
    eta_seconds: float | None
    phase: str
    started: float
    ended: float | None
    failed: str | None  # the error's text
    trials: tuple[TrialResult, ...] = ()  # before the run, the launched plan first
    evaluation: EvaluationResult | None = None
    task_metrics: HarnessResult | None = None
    about: Plan | None = None  # whose model the step deals with, where nothing was predicted for it
    settings: tuple[Setting, ...] = ()
    log_tail: str = ""
    windows: tuple[Window, ...] = ()  # profiled, of this node's ranks
    evaluations: tuple[HeldOutLoss, ...] = ()  # while it trains
    drawn: tuple[Drawn, ...] = ()  # pictures of captions while it trains, the base's first
    exported: tuple[tuple[str, str], ...] = ()  # rows of (what, value): which step the result is
    late: tuple[str, ...] = ()  # lines: for whom the others wait, or have waited


@dataclass
class History:
    """Takes events in any order; cheap to add to, asked only when a card is drawn or the step ends."""

    plan: Plan | None
    total_steps: int | None = None
    tokens_of_steps: Sequence[int] | None = None  # over all processes; None: not known
    _info: dict[int, DistInfo] = field(default_factory=dict)
    _phase: dict[int, Phase] = field(default_factory=dict)
    _memory: dict[int, Memory] = field(default_factory=dict)
    _memory_series: list[Memory] = field(default_factory=list)
    _steps: dict[int, dict[int, Step]] = field(default_factory=dict)  # step, rank
    _windows: list[Window] = field(default_factory=list)
    _checkpoints: list[float] = field(default_factory=list)  # seconds of each, of each rank
    _evaluations: dict[int, HeldOutLoss] = field(default_factory=dict)  # by step; all ranks say the same
    _drawn: DrawnPictures = field(default_factory=DrawnPictures)
    _late: dict[int, Straggling] = field(default_factory=dict)  # by rank, the last that was said

    def add(self, event: Event) -> None:
        if isinstance(event, Step):
            self._steps.setdefault(event.step, {})[event.rank] = event
        elif isinstance(event, Memory):
            self._memory[event.rank] = event
            self._memory_series.append(event)
        elif isinstance(event, Phase):
            before = self._phase.get(event.rank)
            if before is not None and before.name == "checkpoint" and event.name == "train":
                self._checkpoints.append(event.at - before.at)
            self._phase[event.rank] = event
        elif isinstance(event, Profiled):
            self._windows += [Window.from_dict(event.window)] if event.window else []
        elif isinstance(event, Drawn):
            self._drawn.add(event)
        elif isinstance(event, Straggling):
            self._late[event.rank] = event
        elif isinstance(event, Evaluated):
            if event.loss is not None:
                self._evaluations[event.step] = HeldOutLoss(
                    step=event.step, loss=event.loss, metrics=event.metrics or {}, seconds=event.seconds
                )
        elif not isinstance(event, Pace):  # which is looked at where all of them are
            self._info[event.rank] = event

    @property
    def world_size(self) -> int:
        if self._info:
            return next(iter(self._info.values())).world_size
        return self.plan.layout.world_size if self.plan else max(len(self._ranks()), 1)

    @property
    def last_step(self) -> int:
        return max(self._steps, default=0)

    @property
    def phase(self) -> Phase | None:
        """The phase of the rank that has been in its phase longest; None before the first is reported."""
        return min(self._phase.values(), key=lambda phase: phase.at, default=None)

    @property
    def checkpoint_seconds(self) -> float | None:
        """How long training stands still for a checkpoint, the median; None where there was none."""
        return median(self._checkpoints)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The profiled windows, of one rank each."""
        return tuple(sorted(self._windows, key=lambda window: window.rank))

    @property
    def evaluations(self) -> tuple[HeldOutLoss, ...]:
        """The losses on held-out rows, in the order of their steps."""
        return tuple(loss for _, loss in sorted(self._evaluations.items()))

    @property
    def drawn(self) -> tuple[Drawn, ...]:
        """Pictures of held-out captions: the base's and the newest."""
        return self._drawn.shown()

    @property
    def late(self) -> tuple[str, ...]:
        """Lines on the ranks or nodes for which the others wait, or have waited."""
        on_gpus = self.plan is not None and self.plan.layout.device == "cuda"
        return tuple(late_lines(self._late.values(), on_gpus=on_gpus))

    @property
    def memory_series(self) -> list[Memory]:
        return list(self._memory_series)

    def steps(self) -> list[StepRow]:
        """All steps in order, with the speed of the whole run."""
        return [self._row(number, ranks) for number, ranks in sorted(self._steps.items())]

    def ranks(self) -> list[RankRow]:
        return [
            RankRow(
                rank=rank,
                info=self._info.get(rank),
                phase=self._phase[rank].name if rank in self._phase else "",
                memory=self._memory.get(rank),
                tokens_per_second=self._rank_speed(rank),
            )
            for rank in sorted(self._ranks())
        ]

    def tokens_per_second(self) -> float | None:
        """Median of the steps, without the first, which warms up (if there are others)."""
        rows = self.steps()
        return median([row.tokens_per_second for row in rows[1:] or rows])

    def mfu(self) -> float | None:
        rows = self.steps()
        return median([row.mfu for row in rows[1:] or rows if row.mfu is not None])

    def eta_seconds(self) -> float | None:
        if not self.total_steps or not self._steps:
            return None
        seconds = [max(s.dt for s in ranks.values()) for _, ranks in sorted(self._steps.items())]
        first = min(self._steps)  # of this attempt
        return time_left(
            (median(seconds[-20:]) or 0.0) * max(self.total_steps - self.last_step, 0),
            trained=sum(seconds),
            evaluated=sum(each.seconds for each in self.evaluations if each.step >= first),
        )

    def _ranks(self) -> set[int]:
        seen = {rank for ranks in self._steps.values() for rank in ranks}
        return seen | set(self._info) | set(self._phase) | set(self._memory)

    def _row(self, number: int, ranks: dict[int, Step]) -> StepRow:
        speaking = next((s for _, s in sorted(ranks.items()) if s.loss is not None), None)
        some = speaking or ranks[min(ranks)]
        dt = speaking.dt if speaking else max(s.dt for s in ranks.values())
        speed = speed_of(self._tokens(number, ranks), dt, world_size=self.world_size, plan=self.plan)
        return StepRow(
            step=number,
            loss=speaking.loss if speaking else None,
            lr=some.lr,
            grad_norm=some.grad_norm,
            dt=dt,
            dtf=some.dtf,
            dtb=some.dtb,
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            at=max(s.at for s in ranks.values()),
            task=(speaking.metrics if speaking else None) or {},
        )

    def _tokens(self, number: int, ranks: dict[int, Step]) -> float:
        """Tokens of a step over all processes; where nobody has said, as if all had what this node's have."""
        if self.tokens_of_steps is not None and number <= len(self.tokens_of_steps):
            return self.tokens_of_steps[number - 1]
        return sum(step.tokens for step in ranks.values()) / len(ranks) * self.world_size

    def _rank_speed(self, rank: int) -> float | None:
        steps = [ranks[rank] for _, ranks in sorted(self._steps.items()) if rank in ranks]
        return median([s.tokens / s.dt for s in steps[1:] or steps if s.dt > 0])
