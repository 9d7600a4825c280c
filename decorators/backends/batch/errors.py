"""Messages for errors of AWS while a Batch job is submitted or waited for."""

from __future__ import annotations

from estimator.aws_errors import failure_of
from estimator.errors import UserError


def explain(error: Exception, left: str) -> UserError:
    """Explain an error of AWS, or why it cannot be reached, and what to do about it.

    ``left``: the id of a job that was submitted and could not be terminated; empty: there is none.
    """
    failure = failure_of(error)
    ends = f"aws batch terminate-job --job-id {left} --reason stopped ends what goes on unwatched."
    credentials = failure.credentials_error()
    if credentials is not None:
        then = ends if left else "Then: resume."
        return UserError(credentials.problem, f"{credentials.advice.rstrip('.')}. {then}")
    text = failure.message.rstrip(".")
    if failure.kind == "denied":
        advice = "infra/aws has the policy that a launcher needs."
        return UserError(f"AWS refuses: {text} ({failure.code}).", ends if left else advice)
    # Metaflow inspects some answers itself; its exceptions have a headline.
    if failure.kind in ("busy", "refused") or hasattr(error, "headline"):
        advice = "metaflow configure show tells which queue, image and role are in use."
        code = "as Metaflow found" if failure.kind == "other" else failure.code
        return UserError(f"AWS Batch refuses: {text} ({code}).", ends if left else advice)
    return UserError(
        f"AWS can't be reached: {failure.message}",
        ends if left else "Look at AWS_DEFAULT_REGION, and at the network.",
    )
