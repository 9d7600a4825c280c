"""After an attempt that ran out of memory the next one takes another plan, kept in the run's store.

In the store: ``PREFIX/attempt-N.json``, what follows after attempt N. Without it attempt N did not end for
want of memory, and what it was told to do still holds. An attempt whose container was ended as a whole can't
write it: then ``PREFIX/STEP-attempt-N.killed`` is there, from whoever has waited for it.
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
from launchers import pipeline
from launchers.settings import Settings
from launchers.store.bundles import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning:
    """The plans of one run's attempts.

    Parameters
    ----------
    storage:
        Of the run; all nodes see the same.
    prefix:
        The key below which they lie.
    """

    storage: Storage
    prefix: str

    def after(self, attempt: int) -> Iterator[NextPlan]:
        """What the attempts up to ``attempt`` that ran out of memory have left, newest first."""
        for number in range(attempt, -1, -1):
            try:
                values = json.loads(self.storage.get_bytes(self._key(number)))
                yield NextPlan(**{**values, "plan": Plan.from_json(values["plan"])})
            except (FileNotFoundError, ValueError, TypeError, KeyError):  # noqa: PERF203
                continue

    def keep(self, attempt: int, following: NextPlan) -> None:
        """Written by any node: all come to the same."""
        values = {**dataclasses.asdict(following), "plan": following.plan.to_json()}
        self.storage.put_bytes(self._key(attempt), json.dumps(values).encode())

    def has_after(self, attempt: int) -> bool:
        """Whether this very attempt has left a plan."""
        return self.storage.size(self._key(attempt)) is not None

    def note_kill(self, step: str, attempt: int, what: str) -> None:
        """Note that an attempt's container (``what``) was ended as a whole for want of memory."""
        self.storage.put_bytes(self._kill_key(step, attempt), what.encode())

    def kill_of(self, step: str, attempt: int) -> str | None:
        """What was ended so; None: nothing that is known."""
        try:
            return self.storage.get_bytes(self._kill_key(step, attempt)).decode()
        except FileNotFoundError:
            return None

    def _kill_key(self, step: str, attempt: int) -> str:
        return f"{self.prefix}/{step}-attempt-{attempt}.killed"

    def _key(self, attempt: int) -> str:
        return f"{self.prefix}/attempt-{attempt}.json"


def plans_key(run_id: str) -> str:
    """The key below which a run's attempts leave their plans."""
    return f"plans/{run_id}"


def choose_plan(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    *,
    granted: Plan | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan of this attempt: the one that the run was launched with, or what follows on a failed one.

    ``granted`` is the plan by which this attempt's machines were asked for, where that is another one.
    """
    gpu = (granted or launched).request.gpu_type
    for following in plans.after(attempt - 1):
        # Whoever starts the attempts may not be able to ask for another machine
        if not following.needs_other_machine or following.plan.request.gpu_type == gpu:
            say(f"another plan, as an earlier attempt ran out of memory: {following.change}")
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
    """Find and keep what follows on a plan that ran out of memory, in words for the log."""
    try:
        job = pipeline.build_job(settings, spec, steps=None)
        following = after_out_of_memory(failed, job, attempt=attempt, other_machines=other_machines)
    except UserError as error:
        return f"out of memory, and no other plan was found: {error.problem}"
    if following is None:
        return "out of memory, and no plan needs less: take a larger GPU or shorter sequences"
    plans.keep(attempt, following)
    return f"out of memory: a retry goes on with {following.change}"


def after_kill(
    plans: Replanning,
    attempt: int,
    launched: Plan,
    settings: Settings,
    spec: ModelSpec,
    *,
    killed: str,
    granted: Plan | None = None,
) -> str:
    """Find and keep what follows on the attempt before this one, which was ``killed`` as a whole; in words.

    The machines of this attempt are asked for already, so it can't be another GPU.
    """
    failed = attempt - 1
    if plans.has_after(failed):  # by another node of this attempt, or the failed one did get to it
        return f"{killed} ran out of memory"
    plan = choose_plan(plans, failed, launched, granted=granted)
    line = out_of_memory(plans, failed, plan, settings, spec, other_machines=False)
    return f"{killed}: {line}"
