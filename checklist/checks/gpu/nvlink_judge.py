"""Findings about missing, slow or faulty NVLinks, and GPUs not registered by the fabric manager."""

from __future__ import annotations

from collections import defaultdict

from checklist.checks.gpu.peer_gpus import below_peers, kinds_of, load_s
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, shorten
from checklist.judging.wiring import NOMINAL_SHARE
from checklist.measurements import GpuHealth
from checklist.result import Finding, Gravity
from estimator import hardware

# Links: NVIDIA's Health Validation, checks nvlink_active (none may be inactive) and
# nvlink_bandwidth_count_speed (18 of them, at 26,562 MB/s on H100, 53,125 on GB200). Errors: DCGM's
# dcgm_gpu_hardware_limits.h, where one replay or recovery is an error, and CRC errors are none below 100 a
# second. A recovery that succeeded is counted from Blackwell on; DCGM has no limit for that.
SERIOUS_ERRORS = ("replay", "recovery", "failed recovery")
CRC_PER_S = 100.0
BELOW_PRODUCT = 0.95  # share of the data sheet; one of Hopper's 18 links is 5.6 %
_DONE = "completed"
_TRANSIENT = ("route recovery", "access timeout recovery")


def nvlink(context: JudgingContext) -> list[Finding]:
    """Return all findings about NVLinks; empty if the GPUs have neither links nor a fabric."""
    states = context.measurements.health
    findings = below_peers(context, states, "nvlinks_active", "nvlink-down", "FAIL", "NVLinks")
    findings += below_peers(
        context, states, "nvlink_mbytes_per_s", "nvlink-slow", "FAIL", "MB/s on the slowest of its NVLinks"
    )
    before = {state.rank: state for state in context.measurements.health if state.when == "before"}
    after = [state for state in context.measurements.health if state.when == "after"]
    for state in after:
        findings += _errors(context, before.get(state.rank), state)
    newest = list({state.rank: state for state in (*before.values(), *after)}.values())
    for state in newest:
        findings += _fabric(context, state)
    return findings + _cliques(context, newest) + _below_product(context, newest)


def _errors(context: JudgingContext, before: GpuHealth | None, after: GpuHealth) -> list[Finding]:
    """Report error counters that grew during the load; a counter that was reset is ignored."""
    if before is None or before.nvlink_errors is None or after.nvlink_errors is None:
        return []
    increases = {
        kind: count - earlier
        for kind, count in after.nvlink_errors.items()
        if (earlier := before.nvlink_errors.get(kind)) is not None and count > earlier
    }
    if not increases:
        return []
    seconds = load_s(context)
    frequent = seconds > 0 and increases.get("CRC", 0) / seconds >= CRC_PER_S
    verdict: Gravity = "FAIL" if frequent or increases.keys() & set(SERIOUS_ERRORS) else "WARN"
    summary = ", ".join(f"{number:,} {kind}" for kind, number in increases.items())
    return [_of_gpu(context, after, "nvlink-errors", verdict, f"counted errors of its NVLinks: {summary}")]


def _fabric(context: JudgingContext, state: GpuHealth) -> list[Finding]:
    if state.fabric is None:
        return []
    if state.fabric != _DONE:
        symptom = f"is not registered with the fabric manager: {state.fabric}"
        # A single GPU of a shared machine works without the fabric; with several, CUDA does not initialize
        single_gpu = context.measurements.gpus_per_node_asked == 1
        return [_of_gpu(context, state, "fabric-state", "WARN" if single_gpu else "FAIL", symptom)]
    if not state.fabric_faults:
        return []
    verdict: Gravity = "FAIL" if set(state.fabric_faults) - set(_TRANSIENT) else "WARN"
    symptom = f"reports faults of its NVLink fabric: {', '.join(state.fabric_faults)}"
    return [_of_gpu(context, state, "fabric-state", verdict, symptom)]


def _below_product(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report models of which no GPU has the NVLink rate of the data sheet."""
    kinds, rates = kinds_of(context), defaultdict(list)
    for state in states:
        if state.rank in kinds and state.nvlinks_active and state.nvlink_mbytes_per_s:
            rate = state.nvlinks_active * state.nvlink_mbytes_per_s / 1000 * NOMINAL_SHARE
            rates[kinds[state.rank]].append(rate)
    findings = []
    for kind, measured in rates.items():
        gpu = hardware.find_gpu_by_nvml_name(kind)
        if gpu is None or gpu.interconnect_gbps is None or not gpu.interconnect.startswith("NVLink"):
            continue
        expected = gpu.interconnect_gbps / 2  # the table counts both directions
        if max(measured) < BELOW_PRODUCT * expected:
            title = (
                f"The NVLinks of each {gpu.name} carry at most {max(measured):.0f} GB/s in one direction, "
            )
            title += f"the data sheet states {expected:.0f}."
            findings.append(finding("gpu-health", "nvlink-below-product", "WARN", title))
    return findings


def _of_gpu(context: JudgingContext, state: GpuHealth, code: str, verdict: Gravity, symptom: str) -> Finding:
    name = context.name_of_rank(state.rank)
    title = f"The GPU of rank {state.rank} ({name}) {symptom}."
    return finding("gpu-health", code, verdict, title, nodes=[name], ranks=[state.rank], gpu=state.uuid)


def _cliques(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report cliques within one domain, which cannot reach each other over NVLink."""
    domains: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for state in states:
        if state.fabric_clique is not None:
            cluster = state.fabric_clique.rpartition(".")[0]
            # On HGX boards the cluster id is all zeros, and each board is a separate domain
            board = not cluster.strip("0-")
            domains[context.name_of_rank(state.rank) if board else cluster][state.fabric_clique].append(
                state.rank
            )
    findings = []
    for domain, cliques in domains.items():
        if len(cliques) > 1:
            names = [tuple(dict.fromkeys(map(context.name_of_rank, ranks))) for ranks in cliques.values()]
            title = f"NVLink domain {domain} is divided into {len(cliques)} cliques: "
            title += "; ".join(
                f"{len(r)} GPUs of {shorten(n)}" for n, r in zip(names, cliques.values(), strict=True)
            )
            suspects = dict.fromkeys(name for names_of_clique in names for name in names_of_clique)
            findings.append(finding("gpu-health", "fabric-cliques", "WARN", f"{title}.", suspects=suspects))
    return findings
