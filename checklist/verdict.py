"""Judging of measurements: a verdict for each check, then for the run; earlier failures stay open.

Unmeasured is never PASS: a check without measurements is NO-VERDICT, and so is the run if the check is
decisive. A measured figure without a reference is NO-VERDICT too, but does not affect the run's verdict. The
headline then mentions it, and the run still counts for the history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from checklist import one_machine
from checklist import suspects as suspected
from checklist.analysis.baseline import STEADY_NIGHTS, Record, baseline, part_of
from checklist.analysis.busbw import fit
from checklist.analysis.recurrence import Sightings
from checklist.analysis.soundness import sound, sound_records
from checklist.checks.collectives import corruption_judge, hangs_judge, pairs_judge, speed_judge, world_judge
from checklist.checks.collectives.world_judge import EXPECTED_CODES
from checklist.checks.gpu import dcgm_judge, gpus_judge, load_judge
from checklist.checks.host import facts_judge, limits_judge, settings_judge
from checklist.checks.network import efa_judge, loss_judge, mesh_judge, network_judge, open_ports_judge
from checklist.condensed import condensed
from checklist.judging import coverage, shared_hosts, unsound
from checklist.judging.common_cause import common_cause
from checklist.judging.context import JudgingContext, Judgment
from checklist.judging.thresholds import Table, table
from checklist.measurements import Measurements
from checklist.open_failures import still_open
from checklist.past_runs import History
from checklist.reference import Reference
from checklist.registry import CHECKS, PROFILES, Check, Profile
from checklist.result import CheckResult, Finding, FitResult, OpenFailure, Result, Skipped, Verdict

if TYPE_CHECKING:
    from checklist.options import CheckOptions

# Checks that must pass before training is known to work; others may be unavailable on healthy clusters
DECISIVE = ("ranks", "mesh", "gemm", "correctness", "bandwidth", "pairs", "hangs")

NOT_CLEARED = ("slow-suspect", "slow-undecided")  # codes of pairs that were not measured again often enough
OF_NETWORK = ("latency", "bandwidth", "pairs")
SPEED_UNKNOWN = (
    "speed not judged: the expected speed of this network is unknown. Give --expect, the GB/s of the largest "
    "all-reduce, or a row in --thresholds."
)

JUDGES: dict[str, Callable[[JudgingContext], Judgment]] = {
    "ranks": facts_judge.ranks,
    "gpus": gpus_judge.gpus,
    "versions": facts_judge.versions,
    "shared-memory": facts_judge.shared_memory,
    "memlock": facts_judge.memlock,
    "host-settings": settings_judge.host_settings,
    "host-limits": limits_judge.host_limits,
    "interface": network_judge.interface,
    "rdma": network_judge.rdma,
    "hostname": network_judge.hostname,
    "clock": facts_judge.clock,
    "placement": facts_judge.placement,
    "gpu-health": gpus_judge.gpu_health,
    "mesh": mesh_judge.mesh,
    "open-ports": open_ports_judge.open_ports,
    "dcgm": dcgm_judge.dcgm,
    "gemm": speed_judge.gemm,
    "gpu-load": load_judge.gpu_load,
    "corruption": corruption_judge.corruption,
    "hbm": speed_judge.hbm,
    "host-copy": speed_judge.host_copy,
    "peer-copy": speed_judge.peer_copy,
    "efa": efa_judge.efa,
    "storage": speed_judge.storage,
    "datastore": speed_judge.datastore,
    "correctness": world_judge.correctness,
    "latency": world_judge.latency,
    "bandwidth": world_judge.bandwidth,
    "transport": world_judge.transport,
    "pairs": pairs_judge.pairs,
    "loss": loss_judge.loss,
    "hangs": hangs_judge.hangs,
}


def judge_with_options(
    measurements: Measurements,
    options: CheckOptions,
    history: History,
    *,
    thresholds: Table | None = None,
    reference: Reference | None = None,
) -> Result:
    """Judge one run by its options, compared with its history; see :func:`judge`."""
    return judge(
        measurements,
        checks=options.checks,
        thresholds=thresholds,
        history=history.records,
        open_failures=history.open_failures,
        sightings=history.sightings,
        pairs_seen=history.pairs_seen,
        accept_baseline=options.accept_baseline,
        system=options.system,
        expect=options.expect,
        suspects=options.suspects,
        reference=reference,
        reference_node=options.reference_node,
    )


def judge(
    measurements: Measurements,
    *,
    checks: Iterable[Check] = CHECKS.values(),
    thresholds: Table | None = None,
    history: Iterable[Record] = (),
    open_failures: Iterable[OpenFailure] = (),
    sightings: Iterable[Sightings] = (),
    pairs_seen: Mapping[tuple[str, str], float] | None = None,
    accept_baseline: bool = False,
    system: str | None = None,
    expect: float | None = None,
    suspects: Collection[str] = (),
    reference: Reference | None = None,
    reference_node: str | None = None,
) -> Result:
    """Judge one run and build its result.

    Parameters
    ----------
    checks:
        The requested checks.
    thresholds:
        None: the shipped table.
    history:
        Records of earlier runs, of any setting.
    open_failures:
        Open failures of earlier runs (:meth:`Result.open_failures`).
    sightings:
        Records of intermittent faults from earlier runs (:mod:`checklist.analysis.recurrence`).
    pairs_seen:
        Time of each pair's last measurement in earlier runs, Unix time; gives the age of unmeasured pairs.
    accept_baseline:
        Skip the comparison with history, which restarts with this run.
    system:
        User's name of this system in the table of thresholds.
    expect:
        User's expected busbw of the largest all-reduce over all nodes, GB/s.
    suspects:
        Nodes that were to be measured first (:mod:`checklist.suspects`).
    reference:
        Reference host settings from a stored result (:func:`checklist.reference.read`).
    reference_node:
        Node of this run whose settings are the reference.
    """
    measurements = sound(measurements)
    context = JudgingContext(
        measurements=measurements,
        table=thresholds or table(),
        history=sound_records(history),
        sightings=tuple(sightings),
        pairs_seen=pairs_seen or {},
        accept_baseline=accept_baseline,
        system=system,
        expect=expect,
        reference=reference,
        reference_node=reference_node,
    )
    selected = tuple(checks)
    judgments = [
        coverage.add(context, unsound.add(context, shared_hosts.add(context, JUDGES[check.name](context))))
        for check in selected
    ]
    results = tuple(judgment.result for judgment in judgments if isinstance(judgment.result, CheckResult))
    all_findings = [fault for judgment in judgments for fault in judgment.findings]
    # Hangs are listed before others, because they usually cause the other failures
    all_findings.sort(key=lambda fault: (fault.verdict != "FAIL", fault.check != "hangs"))
    findings = tuple(all_findings)
    profile = _profile(measurements)
    standing = still_open(open_failures, results, profile, context.gpus)
    # A failure of absent nodes stays open, but does not affect the verdict on the present ones
    relevant = [item for item in standing if not item.nodes or set(item.nodes) & set(context.all_names)]
    verdict_of_run = overall_verdict(results, relevant)
    verdict = overall_verdict(results, relevant, speed_unknown=_speed_unknown(context, results))
    records = _records(context, judgments, verdict)
    bad_nodes = {name for fault in findings if fault.verdict == "FAIL" for name in fault.nodes}
    bad_nodes |= {name for item in standing if item.blamed for name in item.nodes}
    measured = suspected.measured_suspects(suspects, results)
    result = Result(
        verdict=verdict,
        headline=_headline(context, verdict, results, findings, relevant),
        finished_unix=context.finished_unix,
        profile=profile,
        nodes=context.all_names,
        healthy_nodes=_healthy(context, verdict_of_run, results, findings, relevant, bad_nodes),
        bad_nodes=tuple(sorted(bad_nodes)),
        checks=results,
        skipped=_skipped(selected, judgments),
        findings=findings,
        standing=standing,
        diagnosis=next(
            (judgment.diagnosis for judgment in judgments if judgment.diagnosis is not None), None
        ),
        fits=_fits(measurements),
        busbw_gbytes_per_s=_busbw(context),
        records=records,
        notes=(
            *measurements.notes,
            *suspected.describe_suspects(suspects, context.all_names, measured, findings),
            *_notes(context, records),
        ),
        suspects_measured=measured,
        next_commands=one_machine.next_commands(measurements),
        measurements=measurements,
    )
    return condensed(result)


def overall_verdict(
    checks: Iterable[CheckResult], standing: Iterable[OpenFailure] = (), *, speed_unknown: bool = False
) -> Verdict:
    """Return the run's verdict: FAIL before NO-VERDICT before WARN before PASS.

    NO-VERDICT applies if a decisive check was not measured, if nothing could be judged, or if the speed of
    the network between GPU nodes was measured without anything to compare it with.
    """
    done = tuple(checks)
    verdicts = {check.verdict for check in done}
    if "FAIL" in verdicts or tuple(standing):
        return "FAIL"
    unmeasured = any(
        check.verdict == "NO-VERDICT" and not check.measured and check.check in DECISIVE for check in done
    )
    if unmeasured or speed_unknown or not verdicts & {"PASS", "WARN"}:
        return "NO-VERDICT"
    return "WARN" if "WARN" in verdicts else "PASS"


def _speed_unknown(context: JudgingContext, checks: Iterable[CheckResult]) -> bool:
    """Return whether GPU nodes have measured their network, whose expected speed is unknown."""
    return context.several_gpu_nodes and any(
        check.check == "bandwidth" and check.verdict == "NO-VERDICT" and check.measured for check in checks
    )


def _compared_with_peers_only(checks: Iterable[CheckResult]) -> bool:
    """Return whether bandwidths between nodes were measured, and none has a reference outside this run."""
    figures = [
        figure for check in checks if check.check in ("bandwidth", "pairs") for figure in check.figures
    ]
    return bool(figures) and all(figure.basis in ("peers", "none") for figure in figures)


def _profile(measurements: Measurements) -> Profile:
    return next((profile for profile in PROFILES if profile == measurements.profile), PROFILES[0])


def _healthy(
    context: JudgingContext,
    verdict: Verdict,
    checks: Iterable[CheckResult],
    findings: Iterable[Finding],
    standing: Iterable[OpenFailure],
    bad_nodes: set[str],
) -> tuple[str, ...]:
    """Return nodes that were measured and to which no finding applies or may apply."""
    if verdict == "NO-VERDICT":
        return ()
    excluded = set(bad_nodes)
    for fault in findings:
        if fault.code in (unsound.CODE, *NOT_CLEARED):  # the state of that node is unknown
            excluded |= set(fault.suspects)
        elif fault.verdict == "FAIL":
            excluded |= set(fault.suspects)
            if not fault.nodes and not fault.suspects:
                return ()  # a cluster-wide fault, which may involve any node
    for check in checks:
        if check.check in DECISIVE and check.check not in ("ranks", "hangs"):
            excluded |= set(context.all_names) - set(check.nodes)  # unmeasured nodes
    for item in standing:
        if not item.nodes:
            return ()
        excluded |= set(item.nodes)
    return tuple(name for name in context.all_names if name not in excluded)


def _headline(
    context: JudgingContext,
    verdict: Verdict,
    checks: tuple[CheckResult, ...],
    findings: tuple[Finding, ...],
    standing: list[OpenFailure],
) -> str:
    unmeasured = [check.check for check in checks if check.verdict == "NO-VERDICT"]
    if verdict == "NO-VERDICT":
        missing = next(
            (c for c in checks if c.verdict == "NO-VERDICT" and not c.measured and c.check in DECISIVE), None
        )
        if missing is None and _speed_unknown(context, checks):
            return " ".join([*(fault.title for fault in findings[:1]), _unknown_speed(checks)])
        return "No verdict" + (
            f" on {missing.check}: {missing.reason}" if missing else ": nothing could be judged."
        )
    worst = [fault for fault in findings if fault.verdict == verdict]
    if worst:
        rest = f" And {len(worst) - 1} more." if len(worst) > 1 else ""
        cause = common_cause(context, findings)
        return (f"{cause} " if cause is not None else "") + worst[0].title + rest
    if standing:
        return f"Still open from an earlier run: {standing[0].title}"
    single_machine = one_machine.headline(context.measurements, checks)
    if single_machine is not None:
        return single_machine
    if "bandwidth" in unmeasured or _compared_with_peers_only(checks):
        return _unknown_speed(checks)
    passed_count = sum(check.verdict == "PASS" for check in checks)
    return f"{passed_count} checks passed." + (f" Not judged: {', '.join(unmeasured)}." if unmeasured else "")


def _unknown_speed(checks: Iterable[CheckResult]) -> str:
    works = any(check.check == "correctness" and check.verdict == "PASS" for check in checks)
    return f"{'Software works' if works else 'No fault found'}; {SPEED_UNKNOWN}"


def _skipped(selected: tuple[Check, ...], judgments: Iterable[Judgment]) -> tuple[Skipped, ...]:
    names = {check.name for check in selected}
    not_selected = [Skipped(check=name, reason="Not requested.") for name in CHECKS if name not in names]
    return (
        *(judgment.result for judgment in judgments if isinstance(judgment.result, Skipped)),
        *not_selected,
    )


def _fits(measurements: Measurements) -> tuple[FitResult, ...]:
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for item in measurements.collectives:
        if item.seconds_median is not None and item.error is None and item.bytes > 0:
            points.setdefault((item.op, item.dtype), []).append((item.bytes, item.seconds_median))
    results = []
    for (op, dtype), times in points.items():
        fitted = fit(times)
        if fitted.alpha_s is not None or fitted.beta_gbytes_per_s is not None:
            results.append(
                FitResult(
                    op=op,
                    dtype=dtype,
                    alpha_s=fitted.alpha_s,
                    beta_gbytes_per_s=fitted.beta_gbytes_per_s,
                    half_bytes=fitted.half_bytes,
                )
            )
    return tuple(results)


def _busbw(context: JudgingContext) -> float | None:
    """Return all_reduce's bandwidth at its largest size if it crossed a network; else None."""
    if context.local or len(context.measurements.nodes) < 2:
        return None
    sizes = {
        item.bytes: item.busbw_gbytes_per_s
        for item in context.measurements.collectives
        if item.op == "all_reduce" and item.error is None
    }
    return sizes[max(sizes)] if sizes else None


def _records(
    context: JudgingContext, judgments: Collection[Judgment], verdict: Verdict
) -> tuple[Record, ...]:
    """Build records for the history, none if the nodes share one machine.

    If a figure is below what is expected, no figure of the network counts for a baseline.
    """
    if context.local:
        return ()
    unreliable = any(fault.code in EXPECTED_CODES for judgment in judgments for fault in judgment.findings)
    return tuple(
        Record(
            unix=context.finished_unix,
            verdict="NO-VERDICT"
            if unreliable and _check_of(judgment) in OF_NETWORK
            else _own_verdict(judgment.result, verdict),
            setting=context.setting,
            op=item.op,
            bytes=item.bytes,
            value=item.value,
            unit=item.unit,
            accepted=context.accept_baseline,
            **({} if unreliable and _check_of(judgment) in OF_NETWORK else _parts(judgment, item.parts)),
        )
        for judgment in judgments
        for item in judgment.records
    )


def _check_of(judgment: Judgment) -> str:
    return judgment.result.check


def _parts(judgment: Judgment, parts: Mapping[str, float]) -> dict[str, Any]:
    """Return the parts of a figure that did not fail, and which of them have a warning.

    A failure without a named component may concern any part.
    """
    blamed: dict[str, set[str]] = {"FAIL": set(), "WARN": set()}
    for fault in judgment.findings:
        names = {*fault.nodes, *fault.suspects}
        if fault.verdict == "FAIL" and not names:
            return {}
        blamed[fault.verdict] |= names
    failed, warned = (
        {name for name in parts if _nodes_of_part(name) & blamed[level]} for level in ("FAIL", "WARN")
    )
    return {
        "parts": {name: value for name, value in parts.items() if name not in failed},
        "warned": tuple(sorted(warned - failed)),
    }


def _nodes_of_part(part: str) -> set[str]:
    """Return the nodes of a part: a GPU's name starts with its node's name, a pair's joins two names."""
    return {part, part.rpartition(" ")[0], *part.split(" > ")}


def _own_verdict(result: CheckResult | Skipped, run: Verdict) -> Verdict:
    """Return the verdict with which a check's figures are recorded. ``run``: verdict of the run.

    Figures without a reference count as PASS, so that they start a history, unless a failure of the run may
    have affected them.
    """
    if isinstance(result, Skipped):
        return "NO-VERDICT"
    return "PASS" if result.verdict == "NO-VERDICT" and run != "FAIL" else result.verdict


def _notes(context: JudgingContext, records: Iterable[Record]) -> tuple[str, ...]:
    """Describe changes of the baselines by this run."""
    if context.accept_baseline:
        return ("The history of these figures is discarded and restarts with this run (--accept-baseline).",)
    notes = []
    for record in records:
        history = (*context.same(record), record)
        # A part on a new level has a warning until that level becomes the baseline
        records_by_name = {record.op: history} | {
            f"{record.op} of {name}": part_of(history, name) for name in record.warned
        }
        notes += [
            f"{name}: {STEADY_NIGHTS} steady nights at {current.median:.4g} {record.unit} are the new "
            f"baseline, instead of {current.before:.4g}."
            for name, series in records_by_name.items()
            if (current := baseline(series)) is not None
            and current.before is not None
            and current.since_unix == record.unix
        ]
    return tuple(notes)
