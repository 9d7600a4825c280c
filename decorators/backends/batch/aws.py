"""AWS API calls for AWS Batch, with one-line errors, and the machine types of compute environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from estimator.aws_errors import failure_of
from estimator.errors import UserError
from estimator.hardware.cluster.api import CALL_S
from estimator.remote import log_requests


class RefusedError(Exception):
    """AWS denied the request."""


def clients() -> Callable[[str], Any]:
    """Return a function that creates the client of an AWS service, with a timeout of a few seconds per call.

    Raises UserError if no client can be created.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise UserError(
            "Running on AWS Batch needs boto3, which is not installed.",
            "pip install 'metaflow-finetune[aws]'",
        ) from None
    config = Config(connect_timeout=CALL_S, read_timeout=CALL_S, retries={"total_max_attempts": 1})

    def client(service: str) -> Any:
        try:
            return log_requests(boto3.client(service, config=config))
        except (BotoCoreError, ValueError) as error:
            raise UserError(
                f"AWS cannot be queried: {error}", "Set AWS_DEFAULT_REGION or AWS_PROFILE."
            ) from None

    return client


def query(question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a query's result. Raises UserError if AWS cannot be reached, RefusedError if it denies it."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return question()
    except (BotoCoreError, ClientError) as error:
        failure = failure_of(error)
    if failure.kind in ("unreachable", "other"):
        raise UserError(
            f"AWS Batch cannot be reached: {failure.message}", "Check the region (AWS_DEFAULT_REGION)."
        )
    raise failure.credentials_error() or RefusedError(failure.message)


def unusable(item: Mapping[str, Any]) -> str | None:
    """Return why a queue or compute environment accepts no jobs; None if it accepts them."""
    if item.get("state") == "ENABLED" and item.get("status") in ("VALID", "UPDATING"):
        return None
    reason = item.get("statusReason")
    return f"{item.get('state')}, {item.get('status')}" + (f": {reason}" if reason else "")


def queues(client: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Describe the region's queues, or only the queue with this name or ARN."""
    return list(client.describe_job_queues(**({"jobQueues": [name]} if name else {}))["jobQueues"])


def environments(client: Any, queue: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe a queue's compute environments."""
    names = [item["computeEnvironment"] for item in queue.get("computeEnvironmentOrder") or []]
    if not names:
        return []
    return list(client.describe_compute_environments(computeEnvironments=names)["computeEnvironments"])


def allowed(resources: Mapping[str, Any]) -> list[str]:
    """Return the machine types and families that a compute environment allows."""
    return [str(item) for item in resources.get("instanceTypes") or []]


def matches(name: str, pattern: str) -> bool:
    """Whether a machine type matches a pattern: an exact type, or a family ("p5")."""
    return name == pattern or name.partition(".")[0] == pattern
