"""Questions to AWS, and what its compute environments may start. What cannot be asked is one clear line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from estimator.aws_errors import failure_of
from estimator.errors import UserError
from estimator.hardware.cluster.api import CALL_S
from estimator.remote import log_requests


class NotToldError(Exception):
    """AWS has answered, and doesn't tell."""


def clients() -> Callable[[str], Any]:
    """Makes a client of a service; its questions take seconds. Raises UserError where there can be none."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise UserError(
            "Running on AWS Batch needs boto3, which is not installed.",
            "pip install 'metaflow-finetune[aws]'",
        ) from None
    patience = Config(connect_timeout=CALL_S, read_timeout=CALL_S, retries={"total_max_attempts": 1})

    def client(service: str) -> Any:
        try:
            return log_requests(boto3.client(service, config=patience))
        except (BotoCoreError, ValueError) as error:
            raise UserError(
                f"AWS can't be asked: {error}", "Set AWS_DEFAULT_REGION, or AWS_PROFILE."
            ) from None

    return client


def ask(question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The answer; UserError in one line where AWS cannot be asked, NotToldError where it refuses to say."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return question()
    except (BotoCoreError, ClientError) as error:
        failure = failure_of(error)
    if failure.kind in ("unreachable", "other"):
        raise UserError(
            f"AWS Batch can't be reached: {failure.message}", "Is the region right (AWS_DEFAULT_REGION)?"
        )
    raise failure.credentials_error() or NotToldError(failure.message)


def unusable(item: Mapping[str, Any]) -> str | None:
    """Return why a queue or compute environment takes no jobs; None: it takes them."""
    if item.get("state") == "ENABLED" and item.get("status") in ("VALID", "UPDATING"):
        return None
    reason = item.get("statusReason")
    return f"{item.get('state')}, {item.get('status')}" + (f": {reason}" if reason else "")


def queues(client: Any, name: str | None = None) -> list[dict[str, Any]]:
    """Describe the region's queues, or those of that name or ARN."""
    return list(client.describe_job_queues(**({"jobQueues": [name]} if name else {}))["jobQueues"])


def environments(client: Any, queue: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Describe a queue's compute environments."""
    names = [item["computeEnvironment"] for item in queue.get("computeEnvironmentOrder") or []]
    if not names:
        return []
    return list(client.describe_compute_environments(computeEnvironments=names)["computeEnvironments"])


def allowed(resources: Mapping[str, Any]) -> list[str]:
    """The machine types and families that a compute environment names."""
    return [str(item) for item in resources.get("instanceTypes") or []]


def matches(name: str, pattern: str) -> bool:
    """An exact type, or a family ("p5")."""
    return name == pattern or name.partition(".")[0] == pattern
