"""Changes to the Step Functions state machines that Metaflow compiles: size limits and retries of Batch
jobs.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import Any

from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY

from decorators._metaflow.endings import FinetuneError
from decorators._metaflow.retries import retries_failures

MAX_OVERRIDES = 8192  # characters of a job's containerOverrides (AWS Batch, API of SubmitJob)
_LONG_VALUE = 200  # characters; longer variables are set in the step's script instead
_OWN_PREFIXES = (
    "FINETUNE_",
    "CHECKLIST_",
    "METAFLOW_",
)  # not the user's variables, which may be secrets and must not be stored
# In order; the first match decides (AWS Batch, RetryStrategy.evaluateOnExit)
_RULES = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # a reclaimed spot instance or a broken machine
    {"onExitCode": str(METAFLOW_EXIT_DISALLOW_RETRY), "action": "EXIT"},
)


def compile_state_machines() -> None:
    """Patch Metaflow to compile state machines within the size limits of AWS Batch and with useful retries.

    Commands of steps and their long variables are stored in S3. Raises FinetuneError for a step whose
    overrides are still too long.
    """
    from metaflow.plugins.aws.batch.batch import Batch
    from metaflow.plugins.aws.step_functions.step_functions import StepFunctions

    if hasattr(StepFunctions._compile, "__wrapped__"):
        return
    own_job, own_batch, own_compile = Batch.create_job, StepFunctions._batch, StepFunctions._compile

    @functools.wraps(own_job)
    def create_job(self: Any, *, step_cli: str, env: dict[str, str], **values: Any) -> Any:
        long = {k: v for k, v in env.items() if len(str(v)) > _LONG_VALUE and k.startswith(_OWN_PREFIXES)}
        short = {name: value for name, value in env.items() if name not in long}
        values["offload_command_to_s3"] = True
        return own_job(self, step_cli=_exported(long) + step_cli, env=short, **values)

    @functools.wraps(own_batch)
    def batch(self: Any, node: Any) -> Any:
        job = own_batch(self, node)
        otherwise = "RETRY" if retries_failures(node.name) else "EXIT"
        job.payload["retryStrategy"]["evaluateOnExit"] = [*_RULES, {"onReason": "*", "action": otherwise}]
        return job

    @functools.wraps(own_compile)
    def compile_machine(self: Any) -> Any:
        machine = own_compile(self)
        for name, state in machine.payload["States"].items():
            _check_length(name, (state.get("Parameters") or {}).get("ContainerOverrides"))
        return machine

    Batch.create_job, StepFunctions._batch, StepFunctions._compile = create_job, batch, compile_machine


def _exported(variables: Mapping[str, str]) -> str:
    """Return shell commands that set variables, base64-encoded so that quoting cannot change the values."""
    encoded = {name: base64.b64encode(str(value).encode()).decode() for name, value in variables.items()}
    return "".join(f"export {name}=$(echo {text} | base64 -d) && " for name, text in encoded.items())


def _check_length(step: str, overrides: Mapping[str, Any] | None) -> None:
    length = len(json.dumps(overrides))
    if overrides is not None and (length > MAX_OVERRIDES or not overrides.get("Command")):
        raise FinetuneError(
            f"Step {step} cannot be deployed: its command and variables have {length} characters, "
            f"more than the {MAX_OVERRIDES} that AWS Batch allows.",
            "Remove variables from @environment, or set them in the image.",
        )
