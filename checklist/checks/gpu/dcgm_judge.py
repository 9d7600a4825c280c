"""Check of the results of NVIDIA's diagnostic (dcgmi diag), with DCGM's wording and the GPU."""

from __future__ import annotations

from collections import defaultdict

from checklist.effort import EFFORTS
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.measurements import Diagnosed, DiagnosticFault
from checklist.result import Finding, Gravity

# dcgm_errors.h, dcgmErrorSeverity_t: monitor while workloads continue, and configuration
HARMLESS = (1, 5)


def dcgm(context: JudgingContext) -> Judgment:
    """FAIL for a test of ``dcgmi diag`` that failed, WARN for one with a warning.

    WARN also for a failed test whose errors have severity monitor or configuration only, such as persistence
    mode. Profile deep runs level 2, with nothing else on the GPUs, if dcgmi is on the path.

    Limits: DCGM's only (its documentation, "Diagnostic Plugins"); severities as in dcgm_errors.h, of which
    two are harmless (``HARMLESS``).

    Not detected: anything without dcgmi and a running host engine; what only level 3 finds (stress, power).
    """
    if not context.cuda:
        return skipped("dcgm", "The run uses no GPUs.")
    profile = next((effort for effort in EFFORTS if effort == context.measurements.profile), None)
    diagnosed = context.measurements.diagnosed
    if not diagnosed and profile is not None and not EFFORTS[profile].dcgm_level:
        return skipped("dcgm", f"Profile {profile} does not run DCGM's diagnostic; deep does.")
    if not diagnosed:
        return context.unmeasured("dcgm", "diag")
    if not any(report.installed for report in diagnosed):
        return skipped("dcgm", "dcgmi is on no node's path.")
    findings = [fault for report in diagnosed for fault in _faults(context, report)]
    done = [report for report in diagnosed if report.error is None and (report.passed or report.faults)]
    nodes = context.names(report.node for report in done)
    incomplete = [report for report in diagnosed if report not in done]
    if incomplete and not findings:
        first = incomplete[0]
        reason = first.error or f"it has left out all its tests ({shorten(first.left_out)})"
        names = shorten(context.names(report.node for report in incomplete))
        return no_verdict(
            "dcgm",
            f"No response from DCGM's diagnostic on {names}: {reason}.",
            measured=bool(done),
            nodes=nodes,
        )
    passed_count = len({name for report in done for name in report.passed})
    omitted = tuple(sorted({name for report in done for name in report.left_out}))
    message = f"DCGM's diagnostic at level {diagnosed[0].level}: {passed_count} tests passed"
    message += f", left out {shorten(omitted)}." if omitted else "."
    return decide("dcgm", message, findings, nodes=nodes)


def _faults(context: JudgingContext, diagnosed: Diagnosed) -> list[Finding]:
    """Report a node's faults, grouped by test."""
    ranks = {
        uuid: fact.rank
        for fact in context.facts
        if fact.node == diagnosed.node
        for uuid in fact.gpu_uuids[fact.local_rank :][:1]
    }
    groups: dict[tuple[str, Gravity], list[DiagnosticFault]] = defaultdict(list)
    for fault in diagnosed.faults:
        groups[fault.test, _gravity(fault)].append(fault)
    name = context.name(diagnosed.node)
    findings = []
    for (test, verdict), faults in groups.items():
        affected = [ranks[fault.gpu] for fault in faults if fault.gpu in ranks]
        owner = "the GPU of rank" if len(affected) == 1 else "the GPUs of ranks"
        gpus = f" for {owner} {shorten(tuple(map(str, affected)))}" if affected else ""
        outcome = "fails" if any(fault.failed for fault in faults) else "warns"
        text = next((fault.text for fault in faults if fault.text), "it says no more").rstrip(".")
        title = f"DCGM's test {test} {outcome}{gpus} ({name}): {text}."
        findings.append(finding("dcgm", "dcgm", verdict, title, nodes=[name], ranks=affected, test=test))
    return findings


def _gravity(fault: DiagnosticFault) -> Gravity:
    harmless = fault.severities and set(fault.severities) <= set(HARMLESS)
    return "FAIL" if fault.failed and not harmless else "WARN"
