"""History: the telemetry of one node's ranks, put together step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimator.plan import Plan
from launchers.report.telemetry import DistInfo, Event, Memory, Phase, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One optimizer step of the run. Seconds; None is: not known."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    dt: float  # the slowest rank's
    dtf: float | None
    dtb: float | None
    tokens_per_second: float  # over all processes
    mfu: float | None
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """What is known of one rank."""

    rank: int
    info: DistInfo | None
    phase: str
    memory: Memory | None
    tokens_per_second: float | None  # its own, median of its steps but the first


@dataclass
class History:
    """Takes events in any order; cheap to add to, asked only when a card is drawn or the step ends."""

    plan: Plan | None
    total_steps: int | None = None
    _info: dict[int, DistInfo] = field(default_factory=dict)
    _phase: dict[int, Phase] = field(default_factory=dict)
    _memory: dict[int, Memory] = field(default_factory=dict)
    _memory_series: list[Memory] = field(default_factory=list)
    _steps: dict[int, dict[int, Step]] = field(default_factory=dict)  # step, rank

    def add(self, event: Event) -> None:
        if isinstance(event, Step):
            self._steps.setdefault(event.step, {})[event.rank] = event
        elif isinstance(event, Memory):
            self._memory[event.rank] = event
            self._memory_series.append(event)
        elif isinstance(event, Phase):
            self._phase[event.rank] = event
        else:
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
        """What the slowest rank is at."""
        return min(self._phase.values(), key=lambda phase: phase.at, default=None)

    @property
    def memory_series(self) -> list[Memory]:
        return list(self._memory_series)

    def steps(self) -> list[StepRow]:
        """All steps in order. Ranks of other nodes are taken to be as fast as this node's."""
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
        recent = median([max(s.dt for s in ranks.values()) for _, ranks in sorted(self._steps.items())[-20:]])
        return recent * max(self.total_steps - self.last_step, 0) if recent is not None else None

    def _ranks(self) -> set[int]:
        seen = {rank for ranks in self._steps.values() for rank in ranks}
        return seen | set(self._info) | set(self._phase) | set(self._memory)

    def _row(self, number: int, ranks: dict[int, Step]) -> StepRow:
        speaking = next((s for _, s in sorted(ranks.items()) if s.loss is not None), None)
        some = speaking or ranks[min(ranks)]
        dt = max(s.dt for s in ranks.values())
        mean_tokens = sum(s.tokens for s in ranks.values()) / len(ranks)
        speed = mean_tokens * self.world_size / dt if dt > 0 else 0.0
        return StepRow(
            step=number,
            loss=speaking.loss if speaking else None,
            lr=some.lr,
            grad_norm=some.grad_norm,
            dt=dt,
            dtf=some.dtf,
            dtb=some.dtb,
            tokens_per_second=speed,
            mfu=self._mfu(speed),
            at=max(s.at for s in ranks.values()),
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.plan is None or not self.plan.prediction.peak_flops_per_gpu:
            return None
        peak = self.plan.prediction.peak_flops_per_gpu * self.world_size
        return tokens_per_second * self.plan.prediction.flops_per_token / peak

    def _rank_speed(self, rank: int) -> float | None:
        steps = [ranks[rank] for _, ranks in sorted(self._steps.items()) if rank in ranks]
        return median([s.tokens / s.dt for s in steps[1:] or steps if s.dt > 0])


def median(values: list[float]) -> float | None:
    """The upper median; None of nothing."""
    return sorted(values)[len(values) // 2] if values else None
