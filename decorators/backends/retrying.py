"""The attempt after one that ran out of memory may need another machine, which only a new request brings.

Metaflow starts every attempt from the process that runs the flow, with the step's decorators as they are by
then. So that process looks at what the failed attempt has left (launchers.replanning) and asks for the other
machine. A deployed flow's steps are sized once and for all: there the next attempt has the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decorators._metaflow import Backend, Given, StepView, before_retry, say
from decorators.backends import placing
from decorators.backends.kubernetes.fit import Least
from decorators.backends.kubernetes.request import ClusterFacts
from decorators.backends.options import Options
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.plan import Plan
from launchers.replanning import Replanning, plans_of


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """What is needed to place a step again."""

    step: StepView
    backend: Backend
    options: Options
    given: Mapping[str, Given]
    configured: Mapping[str, Any]
    """The compute decorator's values before the launch has placed the step."""
    least: Callable[[Plan], Least]
    carry: Callable[[Plan], dict[str, str]]
    """The variables by which a plan reaches the step's processes."""

    def install(self) -> None:
        """Have Metaflow ask :meth:`prepare` before each attempt but the first."""
        before_retry(self.step, self.backend, self.prepare)

    def prepare(self, run_id: str, attempt: int) -> dict[str, str]:
        """Change the step's request where the failed attempt calls for it; variables for the next one."""
        left = Replanning(storage=datastore(), prefix=plans_of(run_id)).after(attempt - 1)
        following = next(left, None)
        if following is None or not following.needs_other_machine:
            return {}
        return self.place(following.plan)

    def place(self, plan: Plan) -> dict[str, str]:
        """Ask for this plan's machine from now on; nothing is changed where it can't be had."""
        request = plan.request
        facts = ClusterFacts()
        try:
            if self.options.preflight:
                facts = placing.look(self.backend, request, self.options, self.step, self.least(plan))
            elif self.backend == "batch" and not self.options.queue_for(request.gpu):
                raise UserError(f"no queue is named for it: FINETUNE_QUEUES={request.gpu}=QUEUE")
        except UserError as error:
            say(f"The next attempt has the same GPUs, as {request.gpu} can't be had: {error.problem}")
            return {}
        values = placing.merged(request, self.backend, self.options, self.given, self.configured, facts)
        # Metaflow has merged @resources into the compute decorator by now
        sizes = {name: value for name, value in values["resources"].items() if value is not None}
        if self.backend == "batch":
            sizes.pop("disk", None)
        self.step.set_values(self.backend, {**_texts(sizes), **values.get(self.backend, {})})
        say(f"The next attempt asks for {request.gpus_per_node}x {request.gpu} on each node.")
        return self.carry(plan) | placing.remembered_with(self.step, values["environment"])


def _texts(sizes: Mapping[str, Any]) -> dict[str, str]:
    """Metaflow keeps sizes as text, but for shared memory, which must be a number."""
    return {name: value if name == "shared_memory" else str(value) for name, value in sizes.items()}
