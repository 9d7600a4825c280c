"""Messages for AWS errors during submission of a Batch job and while waiting for it."""

from __future__ import annotations

from estimator.aws_errors import failure_of
from estimator.errors import UserError


def explain(error: Exception, running_job: str) -> UserError:
    """Convert an AWS error, or a failure to reach AWS, to a problem and advice.

    ``running_job``: id of a submitted job that could not be terminated; empty if there is none.
    """
    failure = failure_of(error)
    terminate = f"The job still runs. End it: aws batch terminate-job --job-id {running_job} --reason stopped"
    credentials = failure.credentials_error()
    if credentials is not None:
        next_step = terminate if running_job else "Then: resume."
        return UserError(credentials.problem, f"{credentials.advice.rstrip('.')}. {next_step}")
    text = failure.message.rstrip(".")
    if failure.kind == "denied":
        advice = "See infra/aws for the policy that a launcher needs."
        return UserError(f"AWS refuses: {text} ({failure.code}).", terminate if running_job else advice)
    # Metaflow checks some responses itself; its exceptions have a headline.
    if failure.kind in ("busy", "refused") or hasattr(error, "headline"):
        advice = "Check the queue, image and role: metaflow configure show"
        code = "reported by Metaflow" if failure.kind == "other" else failure.code
        return UserError(f"AWS Batch refuses: {text} ({code}).", terminate if running_job else advice)
    return UserError(
        f"AWS cannot be reached: {failure.message}",
        terminate if running_job else "Check AWS_DEFAULT_REGION and the network.",
    )
