"""Checks of the number of GPUs and of their health before and after a load."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from checklist.checks.gpu import xids_judge
from checklist.checks.gpu.nvlink_judge import nvlink
from checklist.checks.gpu.peer_gpus import below_peers, kinds_of, load_s
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, skipped
from checklist.measurements import GpuHealth
from checklist.result import Finding
from estimator import hardware
from estimator.formatting import format_count

NORMAL_THROTTLING = (
    "software power cap",
    "sync boost",
)  # normal: large GPUs reach their power limit under load
PCIE_REPLAYS_PER_MINUTE = 8  # DCGM's dcgm_gpu_hardware_limits.h
FULL_MEMORY = 0.9  # share of the data sheet or of the peers; ECC in GDDR memory takes a sixteenth
CORRECTED_ERRORS = 50_000_000  # a week; facebookresearch/gcm's limit, which has no time (ours)
_WEEK_S = 7 * 24 * 3600.0


def gpus(context: JudgingContext) -> Judgment:
    """FAIL for a node with fewer GPUs than expected, WARN if a GPU had processes of other users.

    Expected is the count of most nodes or the requested count, whichever is higher. If it does not
    divide that of the machine type (estimator/data/instances.csv), the latter is expected: half of a machine
    can be requested, 7 of 8 GPUs cannot.

    Limits: none; everything is counted.

    Not detected: a GPU that is missing on all nodes of an unlisted machine type.
    """
    if not context.cuda:
        return skipped("gpus", "The run uses no GPUs.")
    if not context.facts:
        return context.unmeasured("gpus", "facts")
    counts = {fact.node: len(fact.gpu_uuids) for fact in context.leaders}
    common = Counter(counts.values()).most_common(1)[0][0]
    machine = None if context.machine is None else context.machine.gpu_count
    findings = []
    for node, count in counts.items():
        expected = max(common, context.measurements.gpus_per_node_asked)
        # A pod may request half of a machine, but not 7 of 8 GPUs
        if machine and machine % max(count, 1):
            expected = machine
        if count < expected:
            title = f"{context.name(node)} has {count} of {expected} GPUs."
            findings.append(finding("gpus", "gpu-count", "FAIL", title, nodes=[context.name(node)]))
    for fact in context.facts:
        if fact.gpu_processes:
            owner = f"the GPU of rank {fact.rank} ({context.name(fact.node)})"
            title = f"{format_count(fact.gpu_processes, 'other process')} used {owner}."
            findings.append(finding("gpus", "gpu-busy", "WARN", title, ranks=[fact.rank]))
    basis = f"as its machine type has {machine}" if machine else "the same everywhere"
    return decide("gpus", f"{common} GPUs on each node, {basis}.", findings, nodes=context.all_names)


def gpu_health(context: JudgingContext) -> Judgment:
    """Judge the health of each GPU by NVML and the kernel's log, before and after the load.

    FAIL for uncorrectable memory errors, pending row remaps, an XID that takes the GPU out of service, a
    recovery action requested by the driver, fewer or slower NVLinks than GPUs of the same kind, NVLink
    recoveries or replays, and a GPU that the fabric manager has not registered. WARN for an XID that only
    ends the application or predates the run, for throttling, for GPUs of one NVLink cluster in several
    cliques, for less memory than GPUs of the model or its data sheet, for many corrected memory errors, for
    memory banks without a spare row, and for NVLinks of all GPUs of a model that carry less than its data
    sheet. Fewer PCIe lanes than GPUs of the same kind are WARN, and FAIL if GPU and slot support more; a
    reduced width on all GPUs of a kind is accepted, because a virtual machine may report a wrong one.

    Limits: actions for XIDs are from xids.csv (NVIDIA's catalogue); throttling reasons that every large GPU
    has under load are ignored (``NORMAL_THROTTLING``); WARN for more than ``PCIE_REPLAYS_PER_MINUTE`` (8,
    DCGM's limit), for ``CORRECTED_ERRORS`` (gcm's limit of 50 million) a week since boot or under load, and
    below ``FULL_MEMORY``, 90 %; NVLinks' errors by DCGM's limits, their rate by ``BELOW_PRODUCT`` (95 %) of
    the data sheet, in checklist/checks/gpu/nvlink_judge.py.

    Not detected: PCIe lanes that all GPUs of a kind lack (see check gpu-load); NVLink errors during
    collectives, because only the load of each GPU and copies between GPUs are covered. PASS requires readable
    XIDs and memory errors after the load, else NO-VERDICT.
    """
    if not context.cuda:
        return skipped("gpu-health", "The run uses no GPUs.")
    states = [state for state in context.measurements.health if state.when != "loaded"]
    after = [state for state in states if state.when == "after"]
    if not context.measurements.health:
        return context.unmeasured("gpu-health", "facts")
    findings = [fault for state in states for fault in _unhealthy(context, state)]
    findings += _corrected(context, states)
    findings += nvlink(context)
    findings += _narrow(context, states)
    findings += _replays(context, states)
    findings += _less_memory(context, after or states)
    unique = {(fault.code, fault.ranks): fault for fault in findings}  # before and after: once
    if not unique and len(after) < len(context.facts):
        return no_verdict("gpu-health", "The state of the GPUs was not read again after the load.")
    if not unique and any(state.xids is None for state in after):
        return no_verdict("gpu-health", "XID events cannot be read here; everything else is in order.")
    if not unique and any(state.ecc_uncorrected is None and state.remap_failed is None for state in after):
        return no_verdict("gpu-health", "Some GPUs do not report memory errors.")
    return decide(
        "gpu-health", "No fault before or after the load.", unique.values(), nodes=context.all_names
    )


def _narrow(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report GPUs whose PCIe link trained to fewer lanes."""
    degraded = {
        state.rank: state
        for state in states
        if state.pcie_width is not None
        and state.pcie_width_most is not None
        and state.pcie_width < state.pcie_width_most
    }
    findings = [
        replace(fault, verdict="FAIL") if set(fault.ranks) & degraded.keys() else fault
        for fault in below_peers(context, states, "pcie_width", "pcie-narrow", "WARN", "PCIe lanes")
    ]
    if findings:
        return findings
    kinds = kinds_of(context)
    per_kind = Counter(kinds.values())
    for rank, state in degraded.items():
        if per_kind[kinds.get(rank, "")] == 1:  # no peers to compare with
            name = context.name_of_rank(rank)
            lanes = f"{state.pcie_width} PCIe lanes of {state.pcie_width_most}"
            title = f"The GPU of rank {rank} ({name}) has {lanes}."
            findings.append(
                finding(
                    "gpu-health", "pcie-narrow", "WARN", title, nodes=[name], ranks=[rank], gpu=state.uuid
                )
            )
    return findings


def _less_memory(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report GPUs with less memory than others of their model, or a model with less than its data sheet."""
    kinds, by_kind = kinds_of(context), defaultdict(list)
    for state in states:
        if state.rank in kinds and state.memory_mib is not None:
            by_kind[kinds[state.rank]].append((state, state.memory_mib))
    findings = []
    for kind, memories in by_kind.items():
        gpu, largest = hardware.find_gpu_by_nvml_name(kind), max(mib for _, mib in memories)
        data_sheet_mib = 0.0 if gpu is None else gpu.vram_bytes / (1 << 20)
        if largest < FULL_MEMORY * data_sheet_mib:
            title = f"All GPUs of model {kind} have at most {largest:,} MiB of memory; the data sheet states "
            title += f"{data_sheet_mib:,.0f}."
            findings.append(finding("gpu-health", "memory-short", "WARN", title))
        for state, mib in memories:
            if mib < FULL_MEMORY * largest:
                name = context.name_of_rank(state.rank)
                title = f"The GPU of rank {state.rank} ({name}) has {mib:,} MiB of memory, others of its "
                title += f"kind {largest:,}."
                findings.append(
                    finding("gpu-health", "memory-short", "WARN", title, nodes=[name], ranks=[state.rank])
                )
    return findings


def _replays(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report GPUs whose PCIe link replayed packets under load more often than the limit."""
    before = {state.rank: state.pcie_replays for state in states if state.when == "before"}
    minutes = max(load_s(context), 60.0) / 60  # at least one: a few replays of a short load are no rate
    findings = []
    for state in states:
        first, final = before.get(state.rank), state.pcie_replays
        if state.when != "after" or first is None or final is None:
            continue
        if (final - first) / minutes > PCIE_REPLAYS_PER_MINUTE:
            name = context.name_of_rank(state.rank)
            replays = f"replayed {final - first:,} packets"
            title = f"The PCIe link of the GPU of rank {state.rank} ({name}) {replays}."
            findings.append(_warning("pcie-replays", title, name, state))
    return findings


def _corrected(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report GPUs that correct many memory errors for the time since boot (a week or more) or of the load."""
    before = {state.rank: state.ecc_corrected for state in states if state.when == "before"}
    uptime = {fact.node: fact.uptime_s or 0.0 for fact in context.leaders}
    under_load_s = max(load_s(context), 60.0)  # as for PCIe replays
    findings = []
    for state in states:
        total, first = state.ecc_corrected, before.get(state.rank)
        if total is None:
            continue
        weeks = max(uptime.get(context.nodes_by_rank.get(state.rank, -1), 0.0) / _WEEK_S, 1.0)
        growth = total - first if state.when == "after" and first is not None else 0
        name = context.name_of_rank(state.rank)
        title = f"The GPU of rank {state.rank} ({name}) has corrected "
        if growth > CORRECTED_ERRORS * under_load_s / _WEEK_S:
            title += f"{growth:,} memory errors in {under_load_s:.0f} s of load."
        elif total > CORRECTED_ERRORS * weeks:
            title += f"{total:,} memory errors since boot, in {weeks * 7:.0f} days or less."
        else:
            continue
        findings.append(_warning("ecc-corrected", title, name, state))
    return findings


def _warning(reason: str, title: str, node: str, state: GpuHealth) -> Finding:
    return finding("gpu-health", reason, "WARN", title, nodes=[node], ranks=[state.rank], gpu=state.uuid)


def _unhealthy(context: JudgingContext, state: GpuHealth) -> list[Finding]:
    name = context.name_of_rank(state.rank)
    gpu = f"The GPU of rank {state.rank} ({name})"
    facts: dict[str, object] = {"gpu": state.uuid}
    faults: list[tuple[str, str, str]] = []
    if state.ecc_uncorrected:
        faults.append(("ecc", "FAIL", f"{gpu} has {state.ecc_uncorrected} uncorrectable memory errors."))
    if state.remap_exhausted_banks:
        banks = f"{state.remap_exhausted_banks} of its memory banks"
        faults.append(("remap-exhausted", "WARN", f"{gpu} has no spare rows left in {banks}."))
    if state.remap_failed:
        faults.append(("remap-failed", "FAIL", f"{gpu} could not remap broken memory rows."))
    elif state.remap_pending:
        faults.append(("remap-pending", "FAIL", f"{gpu} waits for a reset to remap memory rows."))
    if state.xids:
        worst = max(map(xids_judge.action, state.xids), key=xids_judge.ACTIONS.index)
        facts["xids"] = ", ".join(map(str, dict.fromkeys(state.xids)))
        codes = ", ".join(map(xids_judge.describe, dict.fromkeys(state.xids)))
        verdict = "WARN" if worst == "MONITOR" else "FAIL"
        faults.append((f"xid-{worst.lower()}", verdict, f"{gpu} reported XID {codes} during the run."))
    elif older_codes := [code for code in state.xids_earlier or () if xids_judge.action(code) != "MONITOR"]:
        # Permanent faults show in the GPU's state; a reset may have cleared the others since
        facts["xids"] = ", ".join(map(str, dict.fromkeys(older_codes)))
        codes = ", ".join(map(xids_judge.describe, dict.fromkeys(older_codes)))
        faults.append(("xid-earlier", "WARN", f"{gpu} reported XID {codes} before the run, since boot."))
    if state.recovery_action not in (None, "none"):
        facts["action"] = state.recovery_action
        faults.append(("recovery", "FAIL", f"{gpu}: its driver requests a {state.recovery_action}."))
    reasons = [reason for reason in state.throttle_reasons or () if reason not in NORMAL_THROTTLING]
    if reasons:
        facts["reasons"] = ", ".join(reasons)
        faults.append(("throttled", "WARN", f"{gpu} is throttled: {facts['reasons']}."))
    return [
        finding("gpu-health", code, verdict, title, nodes=[name], ranks=[state.rank], **facts)  # type: ignore[arg-type]
        for code, verdict, title in faults
    ]
