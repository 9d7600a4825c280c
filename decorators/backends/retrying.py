"""Change of a step's request for the attempt after one that ran out of memory.

Metaflow starts each attempt from the process that runs the flow, with the current values of the step's
decorators. That process reads the record of the failed attempt (launchers.run.replanning) and requests the
other machine. Steps of a deployed flow have fixed sizes: their next attempt gets the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from decorators._metaflow import StepView, before_retry, print_line
from decorators.backends.disruptions import Disruptions
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.kubernetes import pod_shape
from decorators.backends.overrides import apply_user_values
from decorators.backends.placing import merged_variable
from decorators.backends.registry import BACKENDS
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.plan import MIB, Plan
from launchers.run.replanning import Replanning, plans_key


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """Updates a step's request before each retry if the failed attempt requires another machine."""

    step: StepView
    step_request: StepRequest
    """The request of the launch, before the step was placed."""
    minimum: Callable[[Plan], MinimumRequest]
    carry: Callable[[Plan], dict[str, str]]
    """Returns the variables that pass a plan to the step's processes."""

    def install(self) -> None:
        """Call :meth:`prepare` before each attempt except the first."""
        before_retry(self.step, self.step_request.backend, self.prepare)

    def prepare(self, run_id: str, attempt: int) -> dict[str, str]:
        """Change the step's request if the failed attempt requires it; return the next one's variables."""
        launch = Disruptions(storage=datastore(), run=run_id).launch(self.step.name, attempt)
        replanning = Replanning(storage=datastore(), prefix=plans_key(run_id)).plans_after(launch - 1)
        following = next(replanning, None)
        if following is None or not following.needs_other_machine:
            return {}
        return self.place(following.plan)

    def place(self, plan: Plan) -> dict[str, str]:
        """Request the plan's machine from now on; changes nothing if it is not available."""
        user_values = self.step_request.user_values
        request, _ = apply_user_values(plan.request, user_values, self.step_request.backend)
        step_request = replace(self.step_request, request=request, minimum=self.minimum(plan))
        variables = place_again(self.step, step_request)
        return {} if variables is None else self.carry(plan) | variables


def place_again(step: StepView, step_request: StepRequest) -> dict[str, str] | None:
    """Change a step's request for its next attempt; return the attempt's variables.

    Returns None and changes nothing if the backend cannot run it.
    """
    options, request = step_request.options, step_request.request
    backend = BACKENDS[step_request.backend]
    present = step.values(step_request.backend)
    try:
        facts = backend.preflight(replace(step_request, configured=present))
        values = backend.values_for(replace(step_request, facts=facts))
        if not options.preflight and "queue" in present and "queue" not in values.compute:
            raise UserError(f"no queue is configured: FINETUNE_QUEUES={request.gpu_type}=QUEUE")
    except UserError as error:
        print_line(f"The next attempt uses the same request; another is not available: {error.problem}")
        return None
    # Metaflow has merged @resources into the compute decorator by now
    sizes = {name: value for name, value in values.resources.items() if value is not None}
    sizes = {name: value for name, value in sizes.items() if name in present}
    step.set_values(step_request.backend, {**_texts(sizes), **values.compute})
    gpus = f"{request.gpus} and " if request.gpus_per_node else ""
    print_line(f"The next attempt requests {gpus}{format_bytes(request.memory_mib * MIB)} per node.")
    patches = pod_shape.merged_variable(step.name, values.pod_patches)
    return patches | merged_variable(step, values.environment)


def _texts(sizes: Mapping[str, Any]) -> dict[str, str]:
    """Convert sizes to text, as Metaflow stores them, except shared memory, which must be a number."""
    return {name: value if name == "shared_memory" else str(value) for name, value in sizes.items()}
