"""Report the checklist's findings of thirty nights with one change each.

    python -m benchmarks.nights    # half a minute; writes benchmarks/results/nights.*

Synthetic measurements of six machines with one GPU each go through the functions of a run: the history is
read from the file of earlier nights, used for judging, and extended. Nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checklist import past_runs
from checklist.analysis.baseline import DAY_S
from checklist.judging.thresholds import Table
from checklist.measurements import Measurements, RdmaPort
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_facts, with_pairs

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks.nights"
NIGHTS, NODES = 30, 6
PORTS = tuple(
    RdmaPort(name=f"mlx5_{number}/1", state="ACTIVE", physical="LinkUp", gbps=400, layer="InfiniBand")
    for number in range(8)
)
HEALTHY_GBYTES_PER_S = 45.0  # of the 50 that one port has
FLAPS = (9, 12, 15)  # nights on which the link loses packets in the first pass, but not alone
REPLACED = 12  # first night with another machine in place of the one that was slow for four nights


def _speed(run: Measurements, share: float) -> Measurements:
    locals_ = tuple(
        dataclasses.replace(measurement, value=float(measurement.value or 0) * share)
        for measurement in run.locals
    )
    return dataclasses.replace(run, locals=locals_)


def _sent_again(run: Measurements, flaps: bool) -> Measurements:
    def retransmitted(src: int, dst: int, alone: bool) -> int:
        return 400 if flaps and {src, dst} == {1, 4} and not alone else 3

    pairs = tuple(
        dataclasses.replace(
            measurement,
            segments=10_000,
            retransmitted=retransmitted(measurement.src, measurement.dst, measurement.alone),
        )
        for measurement in run.pairs
    )
    alone = tuple(
        dataclasses.replace(measurement, alone=True, round=100 + measurement.round, retransmitted=3)
        for measurement in pairs
        if flaps and {measurement.src, measurement.dst} == {1, 4}
    )
    return dataclasses.replace(run, pairs=(*pairs, *alone))


def _replaced(night: int, run: Measurements) -> Measurements:
    if REPLACED - 4 <= night < REPLACED:
        slow = {2: 0.5}
        return with_pairs(run, Cluster(nodes=NODES, speed=45, transmit=slow, receive=slow))
    if night >= REPLACED:
        return with_facts(run, 2, hostname="host-new", gpu_uuids=("GPU-new",))
    return run


def _network(run: Measurements, busbw: float) -> Measurements:
    """Return the run with collectives at this bus bandwidth and pairs as fast, in GB/s."""
    collectives = tuple(
        item if item.busbw_gbytes_per_s is None else dataclasses.replace(item, busbw_gbytes_per_s=busbw)
        for item in run.collectives
    )
    changed = dataclasses.replace(run, collectives=collectives)
    return with_pairs(changed, Cluster(nodes=NODES, speed=busbw))


CASES: dict[str, Callable[[int, Measurements], Measurements]] = {
    "nothing": lambda _, run: run,
    "a clock that is always 30 s off": lambda _, run: with_facts(run, 1, clock_offset_s=30.0),
    "7 % slower from night 12 on, lawfully": lambda night, run: _speed(run, 1.0 if night < 12 else 0.93),
    "1 % slower each night from night 10 on": lambda night, run: _speed(run, 0.99 ** max(0, night - 9)),
    "a link that flaps on nights 9, 12 and 15": lambda night, run: _sent_again(run, night in FLAPS),
    "a slow node on nights 8 to 11, replaced on 12": _replaced,
    "20 of 48.7 GB/s expected from night 0 on": lambda _, run: _network(run, 20.0),
}


def nights(change: Callable[[int, Measurements], Measurements]) -> list[Result]:
    """Judge all nights, each with the stored results of earlier ones."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "history.jsonl"
        for night in range(NIGHTS):
            run = gpu_run(NODES, 1, started_unix=night * DAY_S)
            facts = tuple(dataclasses.replace(each, rdma_ports=PORTS) for each in run.facts)
            run = change(night, _network(dataclasses.replace(run, facts=facts), HEALTHY_GBYTES_PER_S))
            past = past_runs.read(place)
            results.append(
                judge(
                    run,
                    thresholds=Table(()),
                    history=past.records,
                    open_failures=past.open_failures,
                    sightings=past.sightings,
                    pairs_seen=past.pairs_seen,
                )
            )
            past_runs.append(results[-1], place)
    return results


def letters(results: list[Result]) -> str:
    """Return the first letter of each night's verdict."""
    return "".join(result.verdict[0] for result in results)


def findings_by_line(results: list[Result]) -> list[dict[str, Any]]:
    """Return the distinct lines of all nights in order of appearance, each with its nights."""
    lines: dict[str, list[int]] = {}
    for night, result in enumerate(results):
        now = [f"{entry.verdict} {entry.check}: {entry.title}" for entry in result.findings]
        now += [f"still open, {entry.check}: {entry.title}" for entry in result.standing]
        now += [note for note in result.notes if "baseline" in note]
        for line in now:
            lines.setdefault(line, []).append(night)
    return [{"line": line, "nights": on} for line, on in lines.items()]


def spans(on: list[int]) -> str:
    """Format nights as spans: "3, 5 to 9"."""
    parts: list[list[int]] = []
    for night in on:
        if parts and night == parts[-1][-1] + 1:
            parts[-1].append(night)
        else:
            parts.append([night])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in parts)


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Findings of each night",
        "",
        f"`{report['command']}`: crafted measurements of {NODES} machines, {NIGHTS} nights from 0 to",
        f"{NIGHTS - 1}, each judged with the history of those before it. P is PASS, W WARN, F FAIL.",
        "",
        "| | night by night |",
        "|---|---|",
        *(f"| {row['case']} | `{row['letters']}` |" for row in report["rows"]),
        "",
    ]
    for row in report["rows"]:
        if row["lines"]:
            lines += [f"## {row['case'][0].upper()}{row['case'][1:]}", ""]
            shown = row["lines"][: report["most"]]
            lines += [f"- {spans(entry['nights'])}: {entry['line']}" for entry in shown]
            remaining = len(row["lines"]) - len(shown)
            lines += [f"- and {remaining} lines more, with other figures"] if remaining else []
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of nights.json and nights.md")
    out = parser.parse_args().out
    rows = []
    for case, change in CASES.items():
        results = nights(change)
        rows.append({"case": case, "letters": letters(results), "lines": findings_by_line(results)})
        print(rows[-1]["letters"], case, flush=True)
    report = {"command": COMMAND, "most": 6, "rows": rows}
    (out / "nights.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "nights.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
