"""What the GPUs say of themselves: how many there are, and whether they are well before and after a load."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from checklist.judges import xids
from checklist.judges.advice import finding
from checklist.judges.context import Answer, Case, answer, no_verdict, skipped
from checklist.measurements import GpuHealth
from checklist.result import Finding

NORMAL_THROTTLING = ("software power cap", "sync boost")  # under load every large GPU meets its power limit


def gpus(case: Case) -> Answer:
    if not case.cuda:
        return skipped("gpus", "The run uses no GPUs.")
    if not case.facts:
        return case.unmeasured("gpus", "facts")
    counts = {fact.node: len(fact.gpu_uuids) for fact in case.leaders}
    usual = Counter(counts.values()).most_common(1)[0][0]
    machine = case.machine_gpus
    found = []
    for node, count in counts.items():
        due = max(usual, case.measurements.gpus_per_node_asked)
        # A pod may ask for half of a machine, but not for 7 of 8
        if machine and machine % max(count, 1):
            due = machine
        if count < due:
            title = f"{case.name(node)} has {count} of {due} GPUs."
            found.append(finding("gpus", "gpu-count", "FAIL", title, nodes=[case.name(node)]))
    for fact in case.facts:
        if fact.gpu_processes:
            who = f"the GPU of rank {fact.rank} ({case.name(fact.node)})"
            title = f"{fact.gpu_processes} processes of others were on {who}."
            found.append(finding("gpus", "gpu-busy", "WARN", title, ranks=[fact.rank]))
    known = f"as its machine type has {machine}" if machine else "the same everywhere"
    return answer("gpus", f"{usual} GPUs on each node, {known}.", found, nodes=case.all_names)


def gpu_health(case: Case) -> Answer:
    if not case.cuda:
        return skipped("gpu-health", "The run uses no GPUs.")
    after = [state for state in case.measurements.health if state.when == "after"]
    if not case.measurements.health:
        return case.unmeasured("gpu-health", "facts")
    found = [fault for state in case.measurements.health for fault in _ill(case, state)]
    found += _fewer(case, "nvlinks_active", "nvlink-down", "FAIL", "NVLinks")
    found += _fewer(case, "pcie_width", "pcie-narrow", "WARN", "PCIe lanes")
    unique = {(fault.code, fault.ranks): fault for fault in found}  # before and after: once
    if not unique and len(after) < len(case.facts):
        return no_verdict("gpu-health", "The GPUs were not asked again after the load.")
    if not unique and any(state.xids is None for state in after):
        return no_verdict("gpu-health", "XID events can't be read here; the rest is in order.")
    if not unique and any(state.ecc_uncorrected is None and state.remap_failed is None for state in after):
        return no_verdict("gpu-health", "Some GPUs don't tell their memory errors.")
    return answer("gpu-health", "Nothing before the load or after.", unique.values(), nodes=case.all_names)


def _fewer(case: Case, field: str, code: str, verdict: Literal["WARN", "FAIL"], what: str) -> list[Finding]:
    """GPUs that have fewer of something than others of their kind; how many are due differs by kind."""
    kinds = {
        fact.rank: fact.gpu_names[fact.local_rank]
        for fact in case.facts
        if fact.local_rank < len(fact.gpu_names)
    }
    known = [(state, getattr(state, field)) for state in case.measurements.health if state.rank in kinds]
    most: dict[str, int] = {}
    for state, count in known:
        if count is not None:
            most[kinds[state.rank]] = max(count, most.get(kinds[state.rank], 0))
    found = []
    for state, count in known:
        due = most.get(kinds[state.rank])
        if count is not None and due is not None and count < due:
            name = case.name_of_rank(state.rank)
            title = f"The GPU of rank {state.rank} ({name}) has {count} {what}, others of its kind {due}."
            found.append(
                finding("gpu-health", code, verdict, title, nodes=[name], ranks=[state.rank], gpu=state.uuid)
            )
    return found


def _ill(case: Case, state: GpuHealth) -> list[Finding]:
    name = case.name_of_rank(state.rank)
    gpu = f"The GPU of rank {state.rank} ({name})"
    told: dict[str, object] = {"gpu": state.uuid}
    found: list[tuple[str, str, str]] = []
    if state.ecc_uncorrected:
        found.append(("ecc", "FAIL", f"{gpu} has {state.ecc_uncorrected} uncorrectable memory errors."))
    if state.remap_failed:
        found.append(("remap-failed", "FAIL", f"{gpu} could not remap broken memory rows."))
    elif state.remap_pending:
        found.append(("remap-pending", "FAIL", f"{gpu} waits for a reset to remap memory rows."))
    if state.xids:
        worst = max(map(xids.action, state.xids), key=xids.ACTIONS.index)
        told["xids"] = ", ".join(map(str, dict.fromkeys(state.xids)))
        named = ", ".join(map(xids.words, dict.fromkeys(state.xids)))
        verdict = "WARN" if worst == "MONITOR" else "FAIL"
        found.append((f"xid-{worst.lower()}", verdict, f"{gpu} reported XID {named} during the run."))
    elif earlier := [code for code in state.xids_earlier or () if xids.action(code) != "MONITOR"]:
        # What lasts shows in the GPU's state; the rest may have been mended by a reset since
        told["xids"] = ", ".join(map(str, dict.fromkeys(earlier)))
        named = ", ".join(map(xids.words, dict.fromkeys(earlier)))
        found.append(("xid-earlier", "WARN", f"{gpu} reported XID {named} before the run, since boot."))
    if state.recovery_action not in (None, "none"):
        told["action"] = state.recovery_action
        found.append(("recovery", "FAIL", f"{gpu}: its driver asks for a {state.recovery_action}."))
    reasons = [reason for reason in state.throttle_reasons or () if reason not in NORMAL_THROTTLING]
    if reasons:
        told["reasons"] = ", ".join(reasons)
        found.append(("throttled", "WARN", f"{gpu} is throttled: {told['reasons']}."))
    return [
        finding("gpu-health", code, verdict, title, nodes=[name], ranks=[state.rank], **told)  # type: ignore[arg-type]
        for code, verdict, title in found
    ]
