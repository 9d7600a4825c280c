"""Which ranks did not come along at all, as the control channel has seen it."""

from __future__ import annotations

from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, answer, no_verdict
from checklist.measurements import IDLE, PHASES, Hang, PhaseName

# Other profiles don't have that phase, whose program has a limit of its own
_DEEP_ALONE: PhaseName = "diag"


def hangs(context: JudgingContext) -> Judgement:
    """FAIL for each rank that hung, died or was lost, as the control channel has seen it.

    Limits: the profile's ``op_limit_s`` (checklist/effort.py), or --op-timeout, for one operation.

    Can't tell: a fault of one's own from a node that its cluster took away with the whole step, nor who held
    up a phase that ended early with nobody behind: both are NO-VERDICT. A run that leaves out phases (other
    than that of DCGM's diagnostic) covers nobody, so that it clears no earlier hang.
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
            f"{names} was lost in {_where(taken[0])}, and its step with it: the cluster's events tell why."
        )
        return no_verdict("hangs", reasons_text)
    failed = [phase for phase in context.measurements.phases if phase.status == "failed"]
    if failed and not findings:
        reasons: dict[str, list[str]] = {}
        for phase in failed:
            reasons.setdefault(phase.reason or "no reason known", []).append(phase.name)
        reasons_text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        return no_verdict("hangs", f"A phase ended early and nobody can be named: {reasons_text}.")
    if not context.measurements.phases:
        return no_verdict("hangs", "Not measured: no phase ran.")
    # A run that leaves out phases can't clear a hang in one of them: it covers nobody
    done = {phase.name for phase in context.measurements.phases if phase.status == "done"}
    whole = done >= set(PHASES) - {_DEEP_ALONE}
    return answer("hangs", "Every phase ended in time.", findings, nodes=context.all_names if whole else ())


def _hang_title(context: JudgingContext, hang: Hang) -> str:
    name, where = context.name(hang.node), _where(hang)
    detail = f": {hang.detail}." if hang.detail else "."
    if hang.kind in ("died", "lost"):
        return f"Rank {hang.rank} ({name}) {'died' if hang.kind == 'died' else 'was lost'} in {where}{detail}"
    step = "" if hang.sequence is None else f" after {hang.sequence} operations"
    return f"Rank {hang.rank} ({name}) hung in {where}{step}; waited for {hang.waited_s:.0f} s{detail}"


def _where(hang: Hang) -> str:
    return f"phase {hang.phase}" if hang.op == IDLE else f"{hang.op} of phase {hang.phase}"
