"""Replanning after an attempt that ran out of memory, with the next plan kept in the run's store.

``PREFIX/attempt-N.json`` is the plan that follows attempt N. If it does not exist, attempt N did not run out
of memory, and its plan remains valid. An attempt whose container was killed cannot write it; then the process
that waited for the container writes ``PREFIX/STEP-attempt-N.killed``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from estimator.errors import UserError
from estimator.models import ModelSpec
from estimator.plan import Plan
from estimator.planning.next_plan import NextPlan, after_out_of_memory
from launchers.run.job import build_job
from launchers.settings import Settings
from launchers.store.bundles import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning:
    """Plans of one run's attempts.

    Parameters
    ----------
    storage:
        The run's storage, shared by all nodes.
    prefix:
        Key prefix of the plans.
    """

    storage: Storage
    prefix: str

    def plans_after(self, attempt: int) -> Iterator[NextPlan]:
        """Iterate over the plans stored after attempts up to ``attempt``, newest first."""
        for number in range(attempt, -1, -1):
            try:
                values = json.loads(self.storage.get_bytes(self._key(number)))
                yield NextPlan(**{**values, "plan": Plan.from_json(values["plan"])})
            except (FileNotFoundError, ValueError, TypeError, KeyError):  # noqa: PERF203
                continue

    def store_plan(self, attempt: int, following: NextPlan) -> None:
        """Store the plan that follows an attempt; every node would store the same."""
        values = {**dataclasses.asdict(following), "plan": following.plan.to_json()}
        self.storage.put_bytes(self._key(attempt), json.dumps(values).encode())

    def has_plan_after(self, attempt: int) -> bool:
        """Whether this attempt has stored a plan to follow it."""
        return self.storage.size(self._key(attempt)) is not None

    def record_kill(self, step: str, attempt: int, container: str) -> None:
        """Record that an attempt's container (``container``) was killed for running out of memory."""
        self.storage.put_bytes(self._kill_key(step, attempt), container.encode())

    def killed_container(self, step: str, attempt: int) -> str | None:
        """Return the container that was killed in an attempt; None if none is known."""
        try:
            return self.storage.get_bytes(self._kill_key(step, attempt)).decode()
        except FileNotFoundError:
            return None

    def _kill_key(self, step: str, attempt: int) -> str:
        return f"{self.prefix}/{step}-attempt-{attempt}.killed"

    def _key(self, attempt: int) -> str:
        return f"{self.prefix}/attempt-{attempt}.json"


def plans_key(run_id: str) -> str:
    """Return the key prefix of a run's plans."""
    return f"plans/{run_id}"


def choose_plan(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    *,
    requested_plan: Plan | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return this attempt's plan: the launched one, or the one that follows a failed attempt.

    ``granted`` is the plan that this attempt's machines were requested with, if it is another one.
    """
    gpu = (requested_plan or launched).request.gpu_type
    for following in plans.plans_after(attempt - 1):
        # The scheduler of the attempts may be unable to request other machines
        if not following.needs_other_machine or following.plan.request.gpu_type == gpu:
            report(f"another plan, as an earlier attempt ran out of memory: {following.change}")
            return following.plan
    return launched


def out_of_memory(
    plans: Replanning,
    attempt: int,
    failed: Plan,
    settings: Settings,
    spec: ModelSpec,
    *,
    other_machines: bool,
) -> str:
    """Choose and store the plan that follows one that ran out of memory; return a message for the log."""
    try:
        job = build_job(settings, spec, steps=None)
        following = after_out_of_memory(failed, job, attempt=attempt, other_machines=other_machines)
    except UserError as error:
        return f"out of memory, and no other plan was found: {error.problem}"
    if following is None:
        return "out of memory, and no plan needs less: use a larger GPU or shorter sequences"
    plans.store_plan(attempt, following)
    return f"out of memory: a retry will use {following.change}"


def after_kill(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    settings: Settings,
    spec: ModelSpec,
    *,
    killed: str,
    requested_plan: Plan | None = None,
) -> str:
    """Choose and store the plan that follows the previous attempt, whose container was ``killed``.

    Returns a message for the log. This attempt's machines are already allocated, so the plan cannot use
    another GPU.
    """
    failed = attempt - 1
    if plans.has_plan_after(failed):  # stored by another node of this attempt, or by the failed attempt
        return f"{killed} ran out of memory"
    plan = choose_plan(plans, failed, launched, requested_plan=requested_plan)
    line = out_of_memory(plans, failed, plan, settings, spec, other_machines=False)
    return f"{killed}: {line}"
