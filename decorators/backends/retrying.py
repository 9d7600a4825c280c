"""The attempt after one that ran out of memory may need another machine, which only a new request brings.

Metaflow starts every attempt from the process that runs the flow, with the step's decorators as they are by
then. So that process looks at what the failed attempt has left (launchers.run.replanning) and asks for the
other machine. A deployed flow's steps are sized once and for all: there the next attempt has the same
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from decorators._metaflow import StepView, before_retry, say
from decorators.backends.disruptions import Disruptions
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.kubernetes import pod_shape
from decorators.backends.overrides import apply_given
from decorators.backends.placing import remembered_with
from decorators.backends.registry import BACKENDS
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.plan import Plan
from launchers.run.replanning import Replanning, plans_key


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """Places a step again before each attempt but the first, as what has failed calls for."""

    step: StepView
    step_request: StepRequest
    """What the launch has asked for, as the step was before it was placed."""
    minimum: Callable[[Plan], MinimumRequest]
    carry: Callable[[Plan], dict[str, str]]
    """The variables by which a plan reaches the step's processes."""

    def install(self) -> None:
        """Have Metaflow ask :meth:`prepare` before each attempt but the first."""
        before_retry(self.step, self.step_request.backend, self.prepare)

    def prepare(self, run_id: str, attempt: int) -> dict[str, str]:
        """Change the step's request where the failed attempt calls for it; variables for the next one."""
        launch = Disruptions(storage=datastore(), run=run_id).launch(self.step.name, attempt)
        left = Replanning(storage=datastore(), prefix=plans_key(run_id)).after(launch - 1)
        following = next(left, None)
        if following is None or not following.needs_other_machine:
            return {}
        return self.place(following.plan)

    def place(self, plan: Plan) -> dict[str, str]:
        """Ask for this plan's machine from now on; nothing is changed where it cannot be had."""
        options, given = self.step_request.options, self.step_request.given
        request, _ = apply_given(plan.request, given, self.step_request.backend)
        backend = BACKENDS[self.step_request.backend]
        step_request = replace(self.step_request, request=request, minimum=self.minimum(plan))
        present = self.step.values(step_request.backend)
        try:
            facts = backend.preflight(replace(step_request, configured=present))
            values = backend.values_for(replace(step_request, facts=facts))
            if not options.preflight and "queue" in present and "queue" not in values.compute:
                raise UserError(f"no queue is named for it: FINETUNE_QUEUES={request.gpu_type}=QUEUE")
        except UserError as error:
            say(f"The next attempt has the same GPUs, as {request.gpu_type} can't be had: {error.problem}")
            return {}
        # Metaflow has merged @resources into the compute decorator by now
        sizes = {name: value for name, value in values.resources.items() if value is not None}
        sizes = {name: value for name, value in sizes.items() if name in present}
        self.step.set_values(step_request.backend, {**_texts(sizes), **values.compute})
        say(f"The next attempt asks for {request.gpus} on each node.")
        patches = pod_shape.remembered_with(self.step.name, values.pod_patches)
        return self.carry(plan) | patches | remembered_with(self.step, values.environment)


def _texts(sizes: Mapping[str, Any]) -> dict[str, str]:
    """Metaflow keeps sizes as text, but for shared memory, which must be a number."""
    return {name: value if name == "shared_memory" else str(value) for name, value in sizes.items()}
