"""Questions to AWS, and what its compute environments may start. What can't be asked is one clear line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from estimator.errors import UserError
from estimator.hardware.cluster_api import CALL_S
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


def ask(question: Callable[[], Any]) -> Any:
    """The answer; UserError in one line where AWS can't be asked, NotToldError where it refuses to say."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        return question()
    except NoCredentialsError:
        raise UserError(
            "There are no AWS credentials here.", "Log in: aws configure, or aws sso login."
        ) from None
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if "Expired" in code:
            raise UserError("The AWS credentials have expired.", "Log in again: aws sso login.") from None
        if code in (
            "UnrecognizedClientException",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "AuthFailure",
        ):
            raise UserError(
                f"AWS doesn't accept the credentials ({code}).", "aws sts get-caller-identity"
            ) from None
        raise NotToldError(str(error.response.get("Error", {}).get("Message", code))) from None
    except BotoCoreError as error:
        if "Token" in type(error).__name__ or "SSO" in type(error).__name__:
            raise UserError(f"The AWS login is over: {error}", "Log in again: aws sso login.") from None
        raise UserError(
            f"AWS Batch can't be reached: {error}", "Is the region right (AWS_DEFAULT_REGION)?"
        ) from None


def allowed(resources: Mapping[str, Any]) -> list[str]:
    """The machine types and families that a compute environment names."""
    return [str(item) for item in resources.get("instanceTypes") or []]


def matches(name: str, pattern: str) -> bool:
    """An exact type, or a family ("p5")."""
    return name == pattern or name.partition(".")[0] == pattern
