"""Failed AWS calls, classified once for all services by exception class and error code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator.errors import UserError

Kind = Literal["no-credentials", "expired", "rejected", "denied", "busy", "refused", "unreachable", "other"]

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html and the "Common Errors" page of the API
# references of EC2, Batch and the Price List
_KIND_OF_CODE: dict[str, Kind] = {
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), "expired"
    ),
    **dict.fromkeys(
        (
            "AuthFailure",
            "InvalidAccessKeyId",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "SignatureDoesNotMatch",
            "UnrecognizedClientException",
        ),
        "rejected",
    ),
    **dict.fromkeys(("403", "AccessDenied", "AccessDeniedException", "UnauthorizedOperation"), "denied"),
    **dict.fromkeys(("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable"), "busy"),
}
_CREDENTIALS = {
    "no-credentials": (
        "there are no AWS credentials",
        "Log in (aws configure, or aws sso login), set AWS_PROFILE, or give the task a role.",
    ),
    "expired": ("the AWS credentials have expired ({code})", "Log in again: aws sso login."),
    "rejected": ("AWS does not accept the credentials ({code})", "Check them: aws sts get-caller-identity"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AwsFailure:
    """A failed AWS call.

    Attributes
    ----------
    kind:
        Kind of failure. ``refused``: AWS responded with any other error; ``other``: no call was made.
    code:
        Error code of AWS, or the class of the exception if AWS did not respond.
    message:
        Error message on one line.
    """

    kind: Kind
    code: str
    message: str

    @property
    def is_missing(self) -> bool:
        """Return whether AWS reported that the object does not exist."""
        return self.code in ("404", "NoSuchKey", "NotFound")

    def credentials_error(self, subject: str = "") -> UserError | None:
        """Return the error for credentials that are missing, expired or rejected; None for other failures.

        ``subject``: the requested object, such as a URL.
        """
        if self.kind not in _CREDENTIALS:
            return None
        problem, advice = _CREDENTIALS[self.kind]
        problem = problem.format(code=self.code)
        return UserError(
            f"{subject}: {problem}." if subject else f"{problem[0].upper()}{problem[1:]}.", advice
        )


def failure_of(error: BaseException) -> AwsFailure:
    """Classify an exception, or the botocore exception that caused it."""
    from botocore import exceptions

    expired = (
        exceptions.SSOError,
        exceptions.TokenRetrievalError,
        exceptions.CredentialRetrievalError,
        getattr(exceptions, "LoginError", exceptions.SSOError),  # of `aws login`, since botocore 1.41
    )
    kinds: tuple[tuple[tuple[type[BaseException], ...], Kind], ...] = (
        ((exceptions.NoCredentialsError, exceptions.PartialCredentialsError), "no-credentials"),
        (expired, "expired"),
        (
            (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError),
            "unreachable",
        ),
    )
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, exceptions.ClientError):
            return _service_failure(origin.response)
        for classes, kind in kinds:
            if isinstance(origin, classes):
                return AwsFailure(kind=kind, code=type(origin).__name__, message=_line(origin))
        origin = origin.__cause__ or origin.__context__
    return AwsFailure(kind="other", code=type(error).__name__, message=_line(error))


def _service_failure(response: dict[str, dict[str, object]]) -> AwsFailure:
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    status = int(str(metadata.get("HTTPStatusCode") or 0))
    code = str(error.get("Code") or status or "an error")
    kind: Kind = "busy" if status >= 500 or status == 429 else "refused"
    return AwsFailure(
        kind=_KIND_OF_CODE.get(code, kind), code=code, message=_line(error.get("Message") or code)
    )


def _line(text: object) -> str:
    return " ".join(str(text).split())
