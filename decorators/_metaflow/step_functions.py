"""Step Functions state machines: sizes that AWS Batch accepts, and retries of jobs."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import Any

from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY

from decorators._metaflow.endings import FinetuneError
from decorators._metaflow.retries import retries_failures

MOST_OVERRIDES = 8192  # characters of a job's containerOverrides (AWS Batch, API of SubmitJob)
_LONG = 200  # characters of a variable that goes into the step's script instead
_OWN = (
    "FINETUNE_",
    "CHECKLIST_",
    "METAFLOW_",
)  # a user's variables may be secrets, which no store is to have
# In order; the first that matches decides (AWS Batch, RetryStrategy.evaluateOnExit)
_RULES = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # a spot machine taken back, a broken one
    {"onExitCode": str(METAFLOW_EXIT_DISALLOW_RETRY), "action": "EXIT"},
)


def compile_state_machines() -> None:
    """From now on, compile state machines whose jobs AWS Batch takes, and retries where that can help.

    The commands of steps, with their long variables, are stored in S3. Raises FinetuneError for a step whose
    overrides are too long all the same.
    """
    from metaflow.plugins.aws.batch.batch import Batch
    from metaflow.plugins.aws.step_functions.step_functions import StepFunctions

    if hasattr(StepFunctions._compile, "__wrapped__"):
        return
    own_job, own_batch, own_compile = Batch.create_job, StepFunctions._batch, StepFunctions._compile

    @functools.wraps(own_job)
    def create_job(self: Any, *, step_cli: str, env: dict[str, str], **values: Any) -> Any:
        long = {k: v for k, v in env.items() if len(str(v)) > _LONG and k.startswith(_OWN)}
        short = {name: value for name, value in env.items() if name not in long}
        values["offload_command_to_s3"] = True
        return own_job(self, step_cli=_exported(long) + step_cli, env=short, **values)

    @functools.wraps(own_batch)
    def batch(self: Any, node: Any) -> Any:
        job = own_batch(self, node)
        others = "RETRY" if retries_failures(node.name) else "EXIT"
        job.payload["retryStrategy"]["evaluateOnExit"] = [*_RULES, {"onReason": "*", "action": others}]
        return job

    @functools.wraps(own_compile)
    def compile_machine(self: Any) -> Any:
        machine = own_compile(self)
        for name, state in machine.payload["States"].items():
            _check_length(name, (state.get("Parameters") or {}).get("ContainerOverrides"))
        return machine

    Batch.create_job, StepFunctions._batch, StepFunctions._compile = create_job, batch, compile_machine


def _exported(variables: Mapping[str, str]) -> str:
    """Shell commands that set variables; as base64, which no quoting on the way to the shell changes."""
    encoded = {name: base64.b64encode(str(value).encode()).decode() for name, value in variables.items()}
    return "".join(f"export {name}=$(echo {text} | base64 -d) && " for name, text in encoded.items())


def _check_length(step: str, overrides: Mapping[str, Any] | None) -> None:
    length = len(json.dumps(overrides))
    if overrides is not None and (length > MOST_OVERRIDES or not overrides.get("Command")):
        raise FinetuneError(
            f"Step {step} can't be deployed: its command and variables have {length} characters, "
            f"and AWS Batch takes {MOST_OVERRIDES}.",
            "Leave variables out of @environment, or put them into the image.",
        )
