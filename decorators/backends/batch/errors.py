"""What AWS refuses while a Batch job is submitted or waited for, in two lines."""

from __future__ import annotations

from estimator.errors import UserError


def explain(error: Exception, left: str) -> UserError:
    """What AWS has refused, or why it can't be asked, and what to do about it.

    ``left``: the id of a job that was submitted and could not be terminated; empty: there is none.
    """
    code, said = _answer(error)
    ends = f"aws batch terminate-job --job-id {left} --reason stopped ends what goes on unwatched."
    if "Expired" in code or "expired" in said:
        return UserError(
            "The AWS credentials have expired while the run needed them.",
            f"Log in again: aws sso login. {ends if left else 'Then: resume.'}",
        )
    if code in ("AccessDeniedException", "AccessDenied", "UnrecognizedClientException"):
        advice = "infra/aws has the policy that a launcher needs."
        return UserError(f"AWS refuses: {said.rstrip('.')} ({code}).", ends if left else advice)
    if code or hasattr(error, "headline"):  # the latter: Metaflow has looked at the answer itself
        advice = "metaflow configure show tells which queue, image and role are in use."
        code = code or "as Metaflow found"
        return UserError(f"AWS Batch refuses: {said.rstrip('.')} ({code}).", ends if left else advice)
    return UserError(
        f"AWS can't be reached: {said}", ends if left else "Look at AWS_DEFAULT_REGION, and at the network."
    )


def _answer(error: BaseException) -> tuple[str, str]:
    """The error code and text of AWS's answer; Metaflow may have put that into an exception of its own."""
    origin: BaseException | None = error
    while origin is not None:
        answer = getattr(origin, "response", None)
        if isinstance(answer, dict) and "Error" in answer:
            reason = answer["Error"]
            return str(reason.get("Code", "")), " ".join(str(reason.get("Message", "")).split())
        origin = origin.__cause__ or origin.__context__
    return "", " ".join(str(error).split())
