"""Goals of the user in addition to fitting: deadline, budget, allowed hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from estimator.errors import UserError
from estimator.formatting import format_usd
from estimator.job import Job
from estimator.option_checks import check_above_zero, check_choice, check_count, check_names
from estimator.planning.interruption_rates import check_rate

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster

PREFERENCES = ("price", "speed")
DISRUPTIONS = 20  # default of the setting resources.max_disruptions
ATTEMPTS = 4  # retries of a deployed step, whose scheduler counts a disruption as a failed attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """The user's goals for a plan in addition to fitting; None and empty: no limit.

    Raises UserError for an invalid value, and for epochs without the size of the dataset.
    """

    deadline_hours: float | None = None
    budget_usd: float | None = None
    tokens: int | None = None  # of the complete job
    epochs: int | None = None  # with dataset_tokens, alternative to tokens
    dataset_tokens: int | None = None
    prefer: Literal["price", "speed"] = "price"  # among plans that meet the other goals
    clouds: tuple[str, ...] = ()
    instance_types: tuple[str, ...] = ()
    spot: bool = False  # use spot instances at spot prices
    interruption_rate: float | None = None  # per spot node and hour; None: from the table, if known
    max_disruptions: int = DISRUPTIONS  # number of disruptions after which a run continues
    cluster: Cluster | None = None  # plan for its present and possible nodes instead of a catalogue
    max_nodes: int | None = None
    max_gpus: int | None = None  # of all nodes

    def __post_init__(self) -> None:
        if self.deadline_hours is not None:
            check_above_zero(
                "deadline_hours", self.deadline_hours, "the hours from start-up to the last step"
            )
        if self.budget_usd is not None:
            check_above_zero("budget_usd", self.budget_usd, "the USD that the complete job may cost")
        for name in ("tokens", "epochs", "dataset_tokens", "max_nodes", "max_gpus"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        for name in ("clouds", "instance_types"):
            check_names(name, getattr(self, name))
        check_rate(self.interruption_rate)
        check_choice("prefer", self.prefer, PREFERENCES)
        if self.epochs is not None and self.dataset_tokens is None:
            raise UserError(
                f"{self.epochs} epochs need the size of the dataset.",
                "Add --dataset-tokens, or use --tokens with the total.",
            )

    def total_tokens(self, job: Job) -> int | None:
        """Return the tokens of the complete job; None if unknown. Raises UserError if a goal needs them."""
        if self.tokens is not None:
            return self.tokens
        if self.dataset_tokens is not None:
            return self.dataset_tokens * (self.epochs or 1)
        if job.steps is not None:
            return job.steps * job.tokens_per_step
        for name, value in (("deadline", self.deadline_hours), ("budget", self.budget_usd)):
            if value is not None:
                raise UserError(
                    f"A {name} of {value:g} {'hours' if name == 'deadline' else 'USD'} needs the amount of "
                    "training.",
                    "Add the tokens of the complete job: --tokens.",
                )
        return None

    @property
    def by_speed(self) -> bool:
        """Whether the fastest plan ranks first: with a budget, or if preferred without a deadline."""
        return self.deadline_hours is None and (self.budget_usd is not None or self.prefer == "speed")

    @property
    def order(self) -> str:
        """Description of the order of the plans."""
        if self.deadline_hours is not None and self.budget_usd is not None:
            budget = format_usd(self.budget_usd)
            return f"cheapest first, within {self.deadline_hours:g} h and {budget}"
        if self.deadline_hours is not None:
            return f"cheapest first, within {self.deadline_hours:g} h"
        if self.budget_usd is not None:
            return f"fastest first, for at most {format_usd(self.budget_usd)}"
        if self.prefer == "speed":
            return "plans that fit, fastest first"
        return "plans that fit, cheapest per token first"

    @property
    def unpriced_order(self) -> str:
        """Description of the order of the plans if no price is known."""
        if self.by_speed:
            return self.order
        within = f", within {self.deadline_hours:g} h" if self.deadline_hours else ""
        return f"prices unknown: fewest GPU-hours first{within}"
