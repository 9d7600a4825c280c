"""Check for ranks that hung, died or were lost, as observed by the control channel."""

from __future__ import annotations

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict
from checklist.measurements import IDLE, PHASES, Hang, PhaseName

# Only some profiles have that phase, and its program has a separate time limit
_DEEP_ALONE: PhaseName = "diag"


def hangs(context: JudgingContext) -> Judgment:
    """FAIL for each rank that hung, died or was lost, as observed by the control channel.

    Limits: the profile's ``op_limit_s`` (checklist/effort.py), or --op-timeout, for one operation.

    Not distinguished (NO-VERDICT): a node fault from a node that the cluster removed with the whole step, and
    the cause of a phase that ended early with no rank behind. A run that skips phases (except DCGM's
    diagnostic) covers no node, so it never clears an earlier hang.
    """
    findings = []
    for hang in context.measurements.hangs:
        if hang.kind != "taken":
            name, title = context.name(hang.node), _hang_title(context, hang)
            where = _where(hang)
            findings.append(
                finding("hangs", hang.kind, "FAIL", title, nodes=[name], ranks=[hang.rank], where=where)
            )
    taken = [hang for hang in context.measurements.hangs if hang.kind == "taken"]
    if taken and not findings:
        names = ", ".join(dict.fromkeys(context.name(hang.node) for hang in taken))
        reasons_text = (
            f"{names} was lost in {_where(taken[0])}, and its step with it; see the cluster's events."
        )
        return no_verdict("hangs", reasons_text)
    failed = [phase for phase in context.measurements.phases if phase.status == "failed"]
    if failed and not findings:
        reasons: dict[str, list[str]] = {}
        for phase in failed:
            reasons.setdefault(phase.reason or "no reason known", []).append(phase.name)
        reasons_text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        return no_verdict(
            "hangs", f"A phase ended early, and the responsible rank is unknown: {reasons_text}."
        )
    if not context.measurements.phases:
        return no_verdict("hangs", "Not measured: no phase ran.")
    # A run that skips phases cannot clear a hang in one of them, so it covers no node
    done = {phase.name for phase in context.measurements.phases if phase.status == "done"}
    complete = done >= set(PHASES) - {_DEEP_ALONE}
    return decide(
        "hangs", "Every phase ended in time.", findings, nodes=context.all_names if complete else ()
    )


def _hang_title(context: JudgingContext, hang: Hang) -> str:
    name, where = context.name(hang.node), _where(hang)
    detail = f": {hang.detail}." if hang.detail else "."
    if hang.kind in ("died", "lost"):
        return f"Rank {hang.rank} ({name}) {'died' if hang.kind == 'died' else 'was lost'} in {where}{detail}"
    step = "" if hang.sequence is None else f" after {hang.sequence} operations"
    return f"Rank {hang.rank} ({name}) hung in {where}{step}; waited for {hang.waited_s:.0f} s{detail}"


def _where(hang: Hang) -> str:
    return f"phase {hang.phase}" if hang.op == IDLE else f"{hang.op} of phase {hang.phase}"
