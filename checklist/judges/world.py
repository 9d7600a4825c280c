"""What the collectives over all ranks say: are they right, fast enough, and over the right network?"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from checklist.analysis.busbw import OPS, SMALL_BYTES
from checklist.judges.advice import finding
from checklist.judges.context import Answer, Case, Records, answer, no_verdict, skipped
from checklist.judges.speed import by_past, hold
from checklist.measurements import Collective
from checklist.result import Figure, Finding

_TOPOLOGY = "NCCL_TOPO_FILE"


def correctness(case: Case) -> Answer:
    tried = [item for item in case.measurements.collectives if not item.bare]
    if not tried:
        return case.unmeasured("correctness", "world")
    found = []
    for op in dict.fromkeys(item.op for item in tried):
        same = [item for item in tried if item.op == op]
        wrong = [item for item in same if item.correct is False]
        failed = [item for item in same if item.error is not None]
        if wrong:
            found.append(_wrong(case, op, wrong))
        elif failed:
            title = f"{op} of {failed[0].bytes} bytes ({failed[0].dtype}) failed: {failed[0].error}."
            found.append(finding("correctness", "collective-failed", "FAIL", title))
    checked = {item.op for item in tried if item.correct is not None}
    missing = sorted(set(OPS) - checked)
    if missing and not found:
        return no_verdict("correctness", f"The values of {', '.join(missing)} were not compared.")
    return answer(
        "correctness", f"{len(checked)} operations gave the right values.", found, nodes=case.all_names
    )


def _wrong(case: Case, op: str, wrong: list[Collective]) -> Finding:
    ranks = sorted({rank for item in wrong for rank in item.wrong_ranks})
    values = sum(item.wrong_values or 0 for item in wrong)
    told = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    title = f"{op} gave {values or 'some'} wrong values{told} ({wrong[0].dtype}, {wrong[0].bytes} bytes)."
    # Whoever sees a wrong value has not necessarily made it
    suspects = [case.name_of_rank(rank) for rank in ranks]
    return finding(
        "correctness", "wrong-values", "FAIL", title, suspects=dict.fromkeys(suspects), ranks=ranks
    )


def transport(case: Case) -> Answer:
    seen = case.measurements.transport
    if seen is None:
        if case.measurements.backend == "gloo":
            return skipped("transport", "gloo has one transport and keeps no log of it.")
        return case.unmeasured("transport", "world")
    if not case.facts:
        return case.unmeasured("transport", "facts")
    found = []
    nodes = len(case.measurements.nodes)
    world = case.measurements.nodes_asked * case.measurements.gpus_per_node_asked
    if seen.nodes_seen is not None and seen.nodes_seen != nodes and not case.local:
        title = f"NCCL saw {seen.nodes_seen} nodes, the launcher {nodes}."
        told = f"{seen.nodes_seen} of {nodes} nodes"
        found.append(finding("transport", "separate-world", "FAIL", title, seen=told))
    elif seen.ranks_seen not in (None, world) and len(case.facts) == world:  # else check ranks tells
        title = f"NCCL's world has {seen.ranks_seen} ranks, the job's {world}."
        told = f"{seen.ranks_seen} of {world} ranks"
        found.append(finding("transport", "separate-world", "FAIL", title, seen=told))
    devices = _rdma(case)
    if devices and seen.network == "socket" and nodes > 1:
        title = f"NCCL uses plain sockets although there are {devices}."
        found.append(finding("transport", "rdma-unused", "FAIL", title, devices=devices))
    if seen.gpu_direct is False and seen.network in ("ib", "efa"):
        title = "GPU Direct RDMA is off: data between nodes goes through host memory."
        found.append(finding("transport", "gdr-off", "WARN", title))
    if not found and (seen.nodes_seen is None or (seen.network is None and nodes > 1 and not case.local)):
        return no_verdict(
            "transport", "The log does not say which network is used or how many nodes there are."
        )
    told = f"{seen.network or 'within one machine'}" + (f" over {seen.interface}" if seen.interface else "")
    return answer("transport", f"{seen.nodes_seen} nodes, {told}.", found, nodes=case.all_names)


def _rdma(case: Case) -> str:
    """The RDMA devices of the nodes, in words; empty: none in sight."""
    efa = max((fact.efa_devices or 0 for fact in case.leaders), default=0)
    if efa or case.machine_fabric.upper().startswith("EFA"):
        return f"{efa} EFA devices" if efa else "EFA devices in this machine type"
    ib = max((len(fact.ib_devices or ()) for fact in case.leaders), default=0)
    return f"{ib} InfiniBand devices" if ib else ""


def latency(case: Case) -> Answer:
    times: dict[str, list[float]] = defaultdict(list)
    for item in _timed(case):
        if item.op == "barrier" or (item.op == "all_reduce" and 0 < item.bytes <= SMALL_BYTES):
            times[item.op].append(float(item.seconds_median or 0))
    if not times:
        return case.unmeasured("latency", "world")
    figures: list[Figure] = []
    found: list[Finding] = []
    records: Records = []
    for op, seconds in times.items():
        name, value = f"{op} latency", statistics.median(seconds)
        records.append((name, None, value, "s"))
        held = by_past(None if case.local else case.past(name, None, value, less_is_better=True))
        figures.append(held.figure(name, value, "s"))
        if held.level in ("WARN", "FAIL"):
            title = f"{op} of a small message takes {value * 1e6:.0f} us, {held.words} s."
            found.append(finding("latency", held.code, held.level, title))
    return _of_world(case, "latency", figures, found, records)


def bandwidth(case: Case) -> Answer:
    large = [
        item for item in _timed(case) if item.busbw_gbytes_per_s is not None and item.bytes > SMALL_BYTES
    ]
    if not large:
        return case.unmeasured("bandwidth", "world")
    figures: list[Figure] = []
    found: list[Finding] = []
    records: Records = []
    for item in large:
        name, value = f"{item.op} {item.dtype}", float(item.busbw_gbytes_per_s or 0)
        largest = item.bytes == max(
            other.bytes for other in large if (other.op, other.dtype) == (item.op, item.dtype)
        )
        if largest:
            records.append((name, item.bytes, value, "GB/s"))
        held = hold(
            value,
            None if case.local else case.threshold(item.op, item.bytes, item.algorithm),
            past=case.past(name, item.bytes, value) if largest and not case.local else None,
        )
        if largest or held.level is not None:
            figures.append(held.figure(name, value, "GB/s", size_bytes=item.bytes))
        if held.level in ("WARN", "FAIL"):
            title = f"{name} of {item.bytes / 2**20:.4g} MiB: busbw {value:.4g} GB/s, {held.words}."
            code = "topology-file" if held.basis == "floor" and _topology_suspect(case) else held.code
            told = case.measurements.environment.get(_TOPOLOGY, "")
            found.append(finding("bandwidth", code, held.level, title, file=told))
    return _of_world(case, "bandwidth", figures, found, records)


def _topology_suspect(case: Case) -> bool:
    """Whether NCCL was given a topology while the GPUs reach each other as fast as they should."""
    floors = {local.what: case.threshold(local.what, None) for local in case.measurements.locals}
    floor = floors.get("peer_copy")
    slow = any(
        local.what == "peer_copy" and floor is not None and (local.value or 0) < floor.floor
        for local in case.measurements.locals
    )
    return _TOPOLOGY in case.measurements.environment and not slow


def _of_world(
    case: Case, check: str, figures: list[Figure], found: list[Finding], records: Records
) -> Answer:
    judged = [figure for figure in figures if figure.basis != "none"]
    if judged:
        good = (
            f"{len(judged)} of {len(figures)} figures had something to be held against, and are as expected."
        )
        return answer(check, good, found, nodes=case.all_names, figures=figures, records=records)
    why = (
        "all nodes are on one machine" if case.local else "no threshold for this system and size, no history"
    )
    return no_verdict(
        check,
        f"Measured, with nothing to compare with: {why}.",
        measured=True,
        nodes=case.all_names,
        figures=figures,
        records=records,
    )


def _timed(case: Case) -> Sequence[Collective]:
    return [
        item
        for item in case.measurements.collectives
        if not item.bare and item.error is None and item.seconds_median is not None
    ]
