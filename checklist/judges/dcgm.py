"""What NVIDIA's own diagnostic has found, in its own words, with the GPU."""

from __future__ import annotations

from collections import defaultdict

from checklist.effort import EFFORTS
from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, answer, few, no_verdict, skipped
from checklist.measurements import Diagnosed, DiagnosticFault
from checklist.result import Finding, Gravity

# dcgm_errors.h, dcgmErrorSeverity_t: to be monitored while work goes on, and of the configuration
HARMLESS = (1, 5)


def dcgm(context: JudgingContext) -> Judgement:
    """FAIL for a test of ``dcgmi diag`` that DCGM calls failed, WARN for one of which it warns.

    WARN too for a failed test whose errors it wants monitored only, or that are of the configuration, such as
    persistence mode. Profile deep runs level 2, alone on the GPUs, where dcgmi is on the path.

    Limits: none of our own; DCGM's are in its documentation ("Diagnostic Plugins"), its severities in
    dcgm_errors.h, of which two are harmless (``HARMLESS``).

    Can't tell: anything without dcgmi and a running host engine; what level 3 would, as stress and power.
    """
    if not context.cuda:
        return skipped("dcgm", "The run uses no GPUs.")
    profile = next((one for one in EFFORTS if one == context.measurements.profile), None)
    told = context.measurements.diagnosed
    if not told and profile is not None and not EFFORTS[profile].dcgm_level:
        return skipped("dcgm", f"Profile {profile} does not run DCGM's diagnostic; deep does.")
    if not told:
        return context.unmeasured("dcgm", "diag")
    if not any(one.installed for one in told):
        return skipped("dcgm", "dcgmi is on no node's path.")
    findings = [fault for one in told for fault in _faults(context, one)]
    answered = [one for one in told if one.error is None and (one.passed or one.faults)]
    nodes = context.names(one.node for one in answered)
    silent = [one for one in told if one not in answered]
    if silent and not findings:
        first = silent[0]
        why = first.error or f"it has left out all its tests ({few(first.left_out)})"
        names = few(context.names(one.node for one in silent))
        return no_verdict(
            "dcgm", f"No answer of DCGM's diagnostic on {names}: {why}.", measured=bool(answered), nodes=nodes
        )
    passed = len({name for one in answered for name in one.passed})
    left_out = tuple(sorted({name for one in answered for name in one.left_out}))
    good = f"DCGM's diagnostic at level {told[0].level}: {passed} tests passed"
    good += f", left out {few(left_out)}." if left_out else "."
    return answer("dcgm", good, findings, nodes=nodes)


def _faults(context: JudgingContext, told: Diagnosed) -> list[Finding]:
    """A node's faults, those of one test together."""
    ranks = {
        uuid: fact.rank
        for fact in context.facts
        if fact.node == told.node
        for uuid in fact.gpu_uuids[fact.local_rank :][:1]
    }
    groups: dict[tuple[str, Gravity], list[DiagnosticFault]] = defaultdict(list)
    for fault in told.faults:
        groups[fault.test, _gravity(fault)].append(fault)
    name = context.name(told.node)
    findings = []
    for (test, verdict), faults in groups.items():
        of_ranks = [ranks[fault.gpu] for fault in faults if fault.gpu in ranks]
        whose = "the GPU of rank" if len(of_ranks) == 1 else "the GPUs of ranks"
        gpus = f" for {whose} {few(tuple(map(str, of_ranks)))}" if of_ranks else ""
        what = "fails" if any(fault.failed for fault in faults) else "warns"
        text = next((fault.text for fault in faults if fault.text), "it says no more").rstrip(".")
        title = f"DCGM's test {test} {what}{gpus} ({name}): {text}."
        findings.append(finding("dcgm", "dcgm", verdict, title, nodes=[name], ranks=of_ranks, test=test))
    return findings


def _gravity(fault: DiagnosticFault) -> Gravity:
    harmless = fault.severities and set(fault.severities) <= set(HARMLESS)
    return "FAIL" if fault.failed and not harmless else "WARN"
