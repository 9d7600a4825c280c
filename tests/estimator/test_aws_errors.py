"""One classification of failed AWS calls for all services."""

from __future__ import annotations

import pytest

from estimator.aws_errors import failure_of

exceptions = pytest.importorskip("botocore.exceptions")


def answer(code: str, status: int = 400) -> Exception:
    response = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: Exception = exceptions.ClientError(response, "Call")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.NoCredentialsError(), "no-credentials"),
        (exceptions.UnauthorizedSSOTokenError(), "expired"),
        (exceptions.TokenRetrievalError(provider="sso", error_msg="no"), "expired"),
        (exceptions.ReadTimeoutError(endpoint_url="https://b"), "unreachable"),
        (exceptions.EndpointConnectionError(endpoint_url="https://b"), "unreachable"),
        (exceptions.NoRegionError(), "other"),
        (answer("ExpiredTokenException"), "expired"),
        (answer("NotExpiredAtAll"), "refused"),  # a code counts as a whole
        (answer("InvalidClientTokenId"), "rejected"),
        (answer("AccessDeniedException"), "denied"),
        (answer("SlowDown", 503), "busy"),
        (answer("Whatever", 500), "busy"),
        (answer("", 404), "refused"),
    ],
)
def test_aws_failures_are_classified_by_class_and_code(error: Exception, kind: str) -> None:
    assert failure_of(error).kind == kind


def test_an_aws_error_wrapped_in_another_exception_is_classified() -> None:
    error = RuntimeError("the upload failed")
    error.__context__ = answer("ExpiredToken")
    failure = failure_of(error)
    assert (failure.kind, failure.code, failure.message) == ("expired", "ExpiredToken", "no")


PROBLEM = "AWS credentials have expired (ExpiredToken)."


@pytest.mark.parametrize(
    ("subject", "problem"), [("", f"The {PROBLEM}"), ("s3://b/k", f"s3://b/k: the {PROBLEM}")]
)
def test_a_credentials_error_names_the_requested_object(subject: str, problem: str) -> None:
    error = failure_of(answer("ExpiredToken")).credentials_error(subject)
    assert error is not None
    assert (error.problem, "aws sso login" in error.advice) == (problem, True)
    assert failure_of(answer("Other")).credentials_error() is None
