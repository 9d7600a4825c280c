"""Plans in environment variables, by which they reach a run's tasks."""

from __future__ import annotations

from estimator import untrusted
from estimator.errors import UserError
from estimator.plan import Plan

PLAN_VARIABLE = "FINETUNE_PLAN"
STAGED_VARIABLE = "FINETUNE_STAGED"  # JSON: where a resolver has put local files that the run needs


def variable_of(step: str) -> str:
    """Return the name of the environment variable that holds the plan of a step with separate options."""
    return f"{PLAN_VARIABLE}_{step.upper()}"


def pack(plan: Plan) -> str:
    """Serialize a plan to one short word: AWS Batch allows 8,192 characters for all variables together."""
    return untrusted.pack(plan.to_json())


def unpack(text: str) -> Plan:
    """Deserialize a plan from the output of :func:`pack`; raises UserError if it is damaged."""
    try:
        return Plan.from_json(untrusted.unpack(text))
    except ValueError as error:
        raise UserError(
            f"The plan in {PLAN_VARIABLE} cannot be read: {error}.",
            "Launch the run again, or deploy the flow again.",
        ) from None
