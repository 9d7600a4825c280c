"""Plans in environment variables, by which they reach a run's tasks."""

from __future__ import annotations

import base64
import zlib

from estimator.plan import Plan

PLAN_VARIABLE = "FINETUNE_PLAN"
STAGED_VARIABLE = "FINETUNE_STAGED"  # JSON: where a resolver has put local files that the run needs


def variable_of(step: str) -> str:
    """Return the name of the environment variable that holds the plan of a step with options of its own."""
    return f"{PLAN_VARIABLE}_{step.upper()}"


def pack(plan: Plan) -> str:
    """Serialize a plan to one short word: AWS Batch allows 8,192 characters for all variables together."""
    return base64.b64encode(zlib.compress(plan.to_json().encode(), 9)).decode()


def unpack(text: str) -> Plan:
    """Deserialize a plan from the output of :func:`pack`."""
    return Plan.from_json(zlib.decompress(base64.b64decode(text)).decode())
