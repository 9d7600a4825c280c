"""Check of the GPUs under load: reduced clocks, power limits, temperature and PCIe generation."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator

from checklist.checks.collectives.speed_judge import peers
from checklist.checks.gpu.gpus_judge import NORMAL_THROTTLING
from checklist.checks.gpu.peer_gpus import below_peers, kinds_of
from checklist.checks.gpu.product_judge import OWN_SHARE, below_product
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, skipped
from checklist.measurements import GpuHealth
from checklist.result import Figure, Finding, Gravity, Verdict

HOTTER_C = 10.0  # above the peers' median, which an outlier must exceed too


def gpu_load(context: JudgingContext) -> Judgment:
    """Judge what NVML reports for each GPU during the matmuls.

    FAIL for median SM clocks 10 % below the median of GPUs of its model, WARN for 5 %, if they are also an
    outlier as for gemm. WARN for a power limit below that of most GPUs of the model; for clocks throttled by
    heat or power faults; for a GPU at its slowdown temperature, or hotter than its peers; for a PCIe
    generation older than that of GPUs of its model (without peers: than GPU and slot support). WARN if all
    GPUs of a model have a power limit, a set clock or a memory clock below their own figures, or a PCIe link
    slower than they support that no copy exceeds.

    Limits: those of check gemm, in checklist/checks/collectives/speed_judge.py; ``OWN_SHARE`` (99 %) of the
    peers' power limit or of the GPU's own figures, ``MEMORY_SHARE`` (95 %) of the highest memory clock;
    NVML's slowdown temperature, and ``HOTTER_C`` (10 °C) above the median of at least four GPUs of the model
    for an outlier. Throttling reasons that every large GPU has under load are ignored
    (``NORMAL_THROTTLING``).

    Not detected: a slow slot common to all GPUs of a model if copies to the host were not measured.
    """
    if not context.cuda:
        return skipped("gpu-load", "The run uses no GPUs.")
    states = [state for state in context.measurements.health if state.when == "loaded"]
    if not states:
        return context.unmeasured("gpu-load", "node")
    nodes = context.names(
        node for state in states if (node := context.nodes_by_rank.get(state.rank)) is not None
    )
    if all(state.sm_clock_mhz is None and state.throttle_reasons is None for state in states):
        return no_verdict("gpu-load", "NVML reports neither clocks nor throttle reasons.")
    kinds = kinds_of(context)
    single_kinds = {kind for kind, count in Counter(kinds.values()).items() if count == 1}
    single = [state for state in states if kinds.get(state.rank) in single_kinds]
    clocks, findings = _clocks(context, states, kinds)
    findings += _capped(context, states, kinds)
    findings += [fault for state in states for fault in _hot(context, state)]
    findings += _hotter(context, states, kinds)
    findings += below_peers(
        context, states, "pcie_generation", "pcie-slow", "WARN", "as its PCIe generation", check="gpu-load"
    )
    findings += [fault for state in single for fault in _old_link(context, state)]
    findings += below_product(context, states)
    figures = [*clocks, *_figures(context, states, "power_w", "power", "W")]
    figures += _figures(context, states, "temperature_c", "temperature", "°C")
    passed = "No GPU is limited by temperature, power or its slot."
    return decide("gpu-load", passed, findings, nodes=nodes, figures=figures)


def _clocks(
    context: JudgingContext, states: list[GpuHealth], kinds: dict[int, str]
) -> tuple[list[Figure], list[Finding]]:
    """Compare each GPU's clock with those of its model."""
    by_kind: dict[str | None, list[tuple[GpuHealth, int]]] = defaultdict(list)
    for state in states:
        if state.sm_clock_mhz is not None:
            by_kind[kinds.get(state.rank)].append((state, state.sm_clock_mhz))
    figures, findings = [], []
    for states_of_kind in by_kind.values():
        clocks = [float(clock) for _, clock in states_of_kind]
        verdicts, median = peers(clocks), statistics.median(clocks)
        for index, (state, clock) in enumerate(states_of_kind):
            level: Verdict = "NO-VERDICT" if verdicts is None else verdicts[index]
            figures.append(
                Figure(
                    name="SM clock",
                    value=clock,
                    unit="MHz",
                    verdict=level,
                    node=context.name_of_rank(state.rank),
                    rank=state.rank,
                    expected=None if verdicts is None else median,
                    basis="none" if verdicts is None else "peers",
                )
            )
            if level in ("WARN", "FAIL"):
                symptom = f"runs at {clock:,} MHz under load, its peers at {median:,.0f}"
                findings.append(
                    _of_gpu(context, state, "clock-low", "FAIL" if level == "FAIL" else "WARN", symptom)
                )
    return figures, findings


def _capped(context: JudgingContext, states: list[GpuHealth], kinds: dict[int, str]) -> list[Finding]:
    """Report GPUs whose power limit is below that of most GPUs of their model."""
    limits: dict[str | None, Counter[float]] = defaultdict(Counter)
    for state in states:
        if state.power_limit_w is not None:
            limits[kinds.get(state.rank)][state.power_limit_w] += 1
    findings = []
    for state in states:
        counts, limit_w = limits[kinds.get(state.rank)], state.power_limit_w
        common_w = max(counts, key=lambda limit: (counts[limit], limit), default=None)
        if limit_w is not None and common_w is not None and limit_w < OWN_SHARE * common_w:
            symptom = f"is capped at {limit_w:.0f} W, others of its kind have {common_w:.0f} W"
            findings.append(_of_gpu(context, state, "power-cap", "WARN", symptom))
    return findings


def _hotter(context: JudgingContext, states: list[GpuHealth], kinds: dict[int, str]) -> list[Finding]:
    """Report GPUs that are hotter under the same load than others of their model."""
    by_kind: dict[str | None, list[tuple[GpuHealth, float]]] = defaultdict(list)
    for state in states:
        if state.temperature_c is not None:
            by_kind[kinds.get(state.rank)].append((state, state.temperature_c))
    findings = []
    for of_kind in by_kind.values():
        verdicts = peers([-temperature for _, temperature in of_kind])
        median = statistics.median(temperature for _, temperature in of_kind)
        for (state, temperature), verdict in zip(of_kind, verdicts or (), strict=False):
            slowed = state.slowdown_c is not None and temperature >= state.slowdown_c  # reported as hot
            if verdict != "PASS" and temperature >= median + HOTTER_C and not slowed:
                symptom = f"is {temperature:.0f} °C hot under load, its peers {median:.0f}"
                findings.append(_of_gpu(context, state, "hotter", "WARN", symptom))
    return findings


def _hot(context: JudgingContext, state: GpuHealth) -> Iterator[Finding]:
    reasons = [reason for reason in state.throttle_reasons or () if reason not in NORMAL_THROTTLING]
    if reasons:
        names = ", ".join(reasons)
        yield _of_gpu(context, state, "throttled", "WARN", f"is throttled under load: {names}", reasons=names)
    temperature, limit = state.temperature_c, state.slowdown_c
    if temperature is not None and limit is not None and temperature >= limit:
        symptom = f"is {temperature:.0f} °C hot under load, and slows down at {limit:.0f}"
        yield _of_gpu(context, state, "hot", "WARN", symptom)


def _old_link(context: JudgingContext, state: GpuHealth) -> Iterator[Finding]:
    """Report an old PCIe generation of a GPU without peers of its model."""
    current, maximum = state.pcie_generation, state.pcie_generation_most
    if current is not None and maximum is not None and current < maximum:
        symptom = f"has a PCIe link of generation {current} under load, where GPU and slot have {maximum}"
        yield _of_gpu(context, state, "pcie-slow", "WARN", symptom)


def _figures(
    context: JudgingContext, states: list[GpuHealth], field: str, name: str, unit: str
) -> Iterator[Figure]:
    for state in states:
        value = getattr(state, field)
        if value is not None:
            node = context.name_of_rank(state.rank)
            yield Figure(name=name, value=value, unit=unit, verdict="NO-VERDICT", node=node, rank=state.rank)


def _of_gpu(
    context: JudgingContext, state: GpuHealth, code: str, verdict: Gravity, symptom: str, reasons: str = ""
) -> Finding:
    name = context.name_of_rank(state.rank)
    title = f"The GPU of rank {state.rank} ({name}) {symptom}."
    return finding(
        "gpu-load", code, verdict, title, nodes=[name], ranks=[state.rank], gpu=state.uuid, reasons=reasons
    )
