"""Report of a step: requested against used, the next request, and what the difference costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from estimator.errors import UserError
from estimator.formatting import MIB
from estimator.job import Target
from estimator.planning.goals import Goals
from estimator.rightsizing.machines import choose_machine, needs_of, usd_per_hour
from estimator.rightsizing.recommend import Recommendation, quantile, recommend
from estimator.rightsizing.usage import Sizes, Usage

_MB = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Requested and used resources of a step's recorded tasks. None: not known."""

    flow: str
    step: str
    tasks: int
    out_of_memory: int  # number of tasks that ran out of memory
    hours: float
    requested: Sizes  # by the newest task
    used: Sizes  # the 95 % quantile of the successful tasks
    next_request: Sizes | None
    usd: float | None  # of the requested sizes, over all tasks that have a price
    wasted_usd: float | None  # part of ``usd`` above the price of the next request

    @property
    def wasted_share(self) -> float | None:
        """Share of the cost, 0 to 1, that is wasted."""
        return self.wasted_usd / self.usd if self.usd and self.wasted_usd is not None else None

    @property
    def resources(self) -> str | None:
        """Line to write into the flow, above ``@step``. Its memory is in MB, which Batch takes as MiB."""
        sizes = self.next_request
        if sizes is None:
            return None
        values = {
            "cpu": None if sizes.cpu is None else f"{sizes.cpu:g}",
            "memory": None if sizes.memory_mib is None else str(math.ceil(sizes.memory_mib * MIB / _MB)),
            "gpu": str(sizes.gpus) if sizes.gpus else None,
        }
        text = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"@resources({text})" + (f"  # {sizes.gpu_type}" if sizes.gpus and sizes.gpu_type else "")

    def to_dict(self) -> dict[str, Any]:
        """Convert to values of JSON."""
        return {**dataclasses.asdict(self), "wasted_share": self.wasted_share, "resources": self.resources}


def report_step(history: Sequence[Usage]) -> StepReport:
    """Report the records of one step, which must not be empty."""
    newest = max(history, key=lambda usage: usage.at)
    recommendation = recommend(history)
    sizes = _next_sizes(recommendation, newest) if recommendation is not None else None
    target_price = usd_per_hour(sizes) if sizes is not None else None
    prices = [(usage, usd_per_hour(usage.requested)) for usage in history]
    costs = [(usage.seconds / 3600, price) for usage, price in prices if price is not None]
    wasted = None
    if costs and target_price is not None:
        wasted = fsum(hours * max(price - target_price, 0.0) for hours, price in costs)
    return StepReport(
        flow=newest.flow,
        step=newest.step,
        tasks=len(history),
        out_of_memory=sum(usage.ending.startswith("out of") for usage in history),
        hours=fsum(usage.seconds for usage in history) / 3600,
        requested=newest.requested,
        used=_used([usage for usage in history if usage.ending == "succeeded"]),
        next_request=sizes,
        usd=fsum(hours * price for hours, price in costs) if costs else None,
        wasted_usd=wasted,
    )


def _next_sizes(recommendation: Recommendation, newest: Usage) -> Sizes:
    """Return the sizes of the next request: on the cheapest GPU of the catalogue that is not slower."""
    sizes = recommendation.sizes
    requested = newest.requested
    sizes = dataclasses.replace(
        sizes, cpu=sizes.cpu or requested.cpu, memory_mib=sizes.memory_mib or requested.memory_mib
    )
    needs = needs_of(recommendation, sizes)
    if needs is None:
        return sizes
    try:
        request = choose_machine(needs, Target(kind="kubernetes"), Goals())
    except UserError:
        return sizes  # no machine of the catalogue has it: the same GPU as before
    return dataclasses.replace(sizes, gpu_type=request.gpu_type)


def _used(succeeded: Sequence[Usage]) -> Sizes:
    memory = [usage.memory_bytes / MIB for usage in succeeded if usage.memory_bytes]
    cpu = [usage.cpu for usage in succeeded if usage.cpu is not None]
    gpus = [sum(gpu.in_use for gpu in usage.gpus) for usage in succeeded if usage.gpus]
    names = [gpu.name for usage in succeeded for gpu in usage.gpus if gpu.in_use]
    return Sizes(
        cpu=round(quantile(cpu), 2) if cpu else None,
        memory_mib=round(quantile(memory)) if memory else None,
        gpus=max(gpus, default=None),
        gpu_type=names[-1] if names else None,
    )
