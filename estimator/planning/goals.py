"""Goals: what the user wants of a plan beyond that it fits: a deadline, a budget, and which machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from estimator.errors import UserError
from estimator.formatting import format_usd
from estimator.job import Job
from estimator.names import unknown_choice
from estimator.planning.interruption_rates import check_rate

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster

PREFERENCES = ("price", "speed")
DISRUPTIONS = 20  # of a run's setting resources.max_disruptions
ATTEMPTS = 4  # retries of a deployed step, whose scheduler counts a disruption as a failed attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """The user's goals for a plan in addition to fitting; None and empty: no limit.

    Raises UserError for a value that cannot be, and for epochs of a dataset whose size is not given.
    """

    deadline_hours: float | None = None
    budget_usd: float | None = None
    tokens: int | None = None  # of the whole job
    epochs: int | None = None  # with dataset_tokens: another way to say tokens
    dataset_tokens: int | None = None
    prefer: Literal["price", "speed"] = "price"  # among plans that meet the rest
    clouds: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    spot: bool = False  # on spot machines, at spot prices; one without such a price has none
    interruption_rate: float | None = None  # of one spot node an hour; None: as the table has it, if it does
    max_disruptions: int = DISRUPTIONS  # that a run goes on after
    cluster: Cluster | None = None  # plan for what it has and could get, instead of a catalogue
    max_nodes: int | None = None
    max_gpus: int | None = None  # of all nodes
    tight: bool = False  # plans with a risk of 2 to 20 % of running out of memory rank like others

    def __post_init__(self) -> None:
        for name in ("deadline_hours", "budget_usd"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} = {value!r} must be a number above 0.")
        for name in ("tokens", "epochs", "dataset_tokens", "max_nodes", "max_gpus"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"{name} = {value!r} must be a whole number above 0.")
        check_rate(self.interruption_rate)
        if self.prefer not in PREFERENCES:
            raise unknown_choice(f"prefer = {self.prefer!r}", self.prefer, PREFERENCES)
        if self.epochs is not None and self.dataset_tokens is None:
            raise UserError(
                f"{self.epochs} epochs are so many times the dataset, whose size is not given.",
                "Give the dataset's tokens too, or the tokens of the whole job.",
            )

    def total_tokens(self, job: Job) -> int | None:
        """Tokens of the whole job; None where nothing says so. UserError where a goal needs them."""
        if self.tokens is not None:
            return self.tokens
        if self.dataset_tokens is not None:
            return self.dataset_tokens * (self.epochs or 1)
        if job.steps is not None:
            return job.steps * job.tokens_per_step
        for name, value in (("deadline", self.deadline_hours), ("budget", self.budget_usd)):
            if value is not None:
                raise UserError(
                    f"A {name} of {value:g} {'hours' if name == 'deadline' else 'USD'} says nothing without "
                    "the amount of training.",
                    "Give the tokens of the whole job: --tokens.",
                )
        return None

    @property
    def by_speed(self) -> bool:
        """Whether the fastest is first: within a budget, or as preferred where there is no deadline."""
        return self.deadline_hours is None and (self.budget_usd is not None or self.prefer == "speed")

    @property
    def order(self) -> str:
        """The order of the plans, in words."""
        if self.deadline_hours is not None and self.budget_usd is not None:
            budget = format_usd(self.budget_usd)
            return f"cheapest first, of those done within {self.deadline_hours:g} h for {budget}"
        if self.deadline_hours is not None:
            return f"cheapest first, of those done within {self.deadline_hours:g} h"
        if self.budget_usd is not None:
            return f"fastest first, of those that cost at most {format_usd(self.budget_usd)}"
        if self.prefer == "speed":
            return "those that fit and reach the batch; fastest first"
        return "those that fit and reach the batch; cheapest a token first"

    @property
    def unpriced_order(self) -> str:
        """The order of the plans where no price is known, in words."""
        if self.by_speed:
            return self.order
        within = f", of those done within {self.deadline_hours:g} h" if self.deadline_hours else ""
        return f"no price is known: fewest GPU-hours first{within}"
