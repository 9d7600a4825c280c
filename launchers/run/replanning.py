"""Replanning after an attempt that ran out of memory; plans for later attempts are in the run's store.

``PREFIX/attempt-N.json`` is the plan for the attempts after attempt N. If it does not exist, attempt N did
not run out of memory, and its plan remains valid. An attempt whose container was killed cannot write that
file; instead the process that waits for the container writes ``PREFIX/STEP-attempt-N.killed``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from estimator.errors import UserError
from estimator.models import ModelSpec
from estimator.plan import Plan
from launchers.run.job import build_job
from launchers.settings import Settings
from launchers.store.bundles import Storage

if TYPE_CHECKING:
    from estimator.planning.next_plan import NextPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning:
    """Store of the plans and out-of-memory kills of one run's attempts.

    Parameters
    ----------
    storage:
        Storage of the run, shared by all nodes.
    prefix:
        Key prefix of the stored plans.
    """

    storage: Storage
    prefix: str

    def plans_after(self, attempt: int) -> Iterator[NextPlan]:
        """Iterate over the plans stored by ``attempt`` and earlier attempts, newest first."""
        for number in range(attempt, -1, -1):
            try:
                values = json.loads(self.storage.get_bytes(self._key(number)))
                from estimator.planning.next_plan import NextPlan  # slow to import, and rarely needed

                yield NextPlan(**{**values, "plan": Plan.from_json(values["plan"])})
            except (FileNotFoundError, ValueError, TypeError, KeyError):  # noqa: PERF203
                continue

    def store_plan(self, attempt: int, next_plan: NextPlan) -> None:
        """Store the plan for the attempts after ``attempt``; all nodes would store the same plan."""
        values = {**dataclasses.asdict(next_plan), "plan": next_plan.plan.to_json()}
        self.storage.put_bytes(self._key(attempt), json.dumps(values).encode())

    def has_plan_after(self, attempt: int) -> bool:
        """Whether a plan for the attempts after ``attempt`` is stored."""
        return self.storage.size(self._key(attempt)) is not None

    def record_kill(self, step: str, attempt: int, container: str) -> None:
        """Record that ``container`` of an attempt was killed because it ran out of memory."""
        self.storage.put_bytes(self._kill_key(step, attempt), container.encode())

    def killed_container(self, step: str, attempt: int) -> str | None:
        """Return the container of an attempt that was killed; None if no kill was recorded."""
        try:
            return self.storage.get_bytes(self._kill_key(step, attempt)).decode()
        except FileNotFoundError:
            return None

    def _kill_key(self, step: str, attempt: int) -> str:
        return f"{self.prefix}/{step}-attempt-{attempt}.killed"

    def _key(self, attempt: int) -> str:
        return f"{self.prefix}/attempt-{attempt}.json"


def plans_key(run_id: str) -> str:
    """Return the key prefix under which :class:`Replanning` stores a run's plans."""
    return f"plans/{run_id}"


def choose_plan(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    *,
    requested_plan: Plan | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return this attempt's plan: ``launched``, or the newest plan stored after running out of memory.

    ``requested_plan``: plan whose machines were requested for this attempt; None: ``launched``.
    """
    gpu = (requested_plan or launched).request.gpu_type
    for next_plan in plans.plans_after(attempt - 1):
        # A retry may be unable to request other machines, so plans for other GPUs are skipped
        if not next_plan.needs_other_machine or next_plan.plan.request.gpu_type == gpu:
            report(f"using another plan because an earlier attempt ran out of memory: {next_plan.change}")
            return next_plan.plan
    return launched


def plan_after_out_of_memory(
    plans: Replanning,
    attempt: int,
    failed: Plan,
    settings: Settings,
    spec: ModelSpec,
    *,
    other_machines: bool,
) -> str:
    """Choose and store the plan for the attempts after one that ran out of memory; return a log message.

    ``failed``: plan of the failed attempt. ``other_machines``: whether a retry can request another GPU.
    """
    from estimator.planning.next_plan import after_out_of_memory

    try:
        job = build_job(settings, spec, steps=None)
        next_plan = after_out_of_memory(failed, job, attempt=attempt, other_machines=other_machines)
    except UserError as error:
        return f"out of memory, and no other plan was found: {error.problem}"
    if next_plan is None:
        return "out of memory, and no plan needs less: use a larger GPU or shorter sequences"
    plans.store_plan(attempt, next_plan)
    return f"out of memory: a retry will use {next_plan.change}"


def plan_after_kill(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    settings: Settings,
    spec: ModelSpec,
    *,
    killed: str,
    requested_plan: Plan | None = None,
) -> str:
    """Choose and store a plan for this attempt, because a container of the previous attempt was killed.

    ``killed``: name of that container. This attempt's machines are already allocated, so the plan cannot use
    another GPU. Returns a log message.
    """
    failed = attempt - 1
    if plans.has_plan_after(failed):  # stored by another node of this attempt, or by the failed attempt
        return f"{killed} ran out of memory"
    plan = choose_plan(plans, failed, launched, requested_plan=requested_plan)
    line = plan_after_out_of_memory(plans, failed, plan, settings, spec, other_machines=False)
    return f"{killed}: {line}"
