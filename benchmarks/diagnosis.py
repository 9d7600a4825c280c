"""Score the diagnosis on simulated faults: how often it names the faulty part, and how often a healthy one.

    python -m benchmarks.diagnosis    # a few minutes; writes benchmarks/results/diagnosis.*
    python -m benchmarks.diagnosis --first-night    # minutes; benchmarks/results/first_night.*
    python -m benchmarks.diagnosis --many-slow      # seconds; benchmarks/results/many_slow.*

Simulated clusters go through the very functions that a run uses: the rounds of pairs, the first diagnosis,
the second pass of the suspects, the final diagnosis. Nothing here was measured on a network.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from checklist.analysis import sharing
from checklist.analysis.diagnosis import PASSES, Diagnosis, diagnose
from checklist.analysis.screening import more_rounds, rates, slow_pairs
from checklist.effort import EFFORTS
from checklist.measurements import Pair
from checklist.round_robin import ALL_PAIRS_UP_TO, MORE_ROUNDS, ROUNDS_ABOVE, Pairs, schedule
from checklist.run.pairing import PAIR_REPETITIONS, SCREEN_PASSES, SCREEN_TURN_S
from tests.checklist.clusters import Cluster, Measured, slow_nodes

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks.diagnosis"
NODES = (3, 4, 6, 8, 16, 32, 64, 256, 1024)
KINDS = ("node", "transmit", "receive", "link")
CASES = ("none", *KINDS, "two")
NOISES = ("independent", "shared spine", "other jobs")
LEFT = 0.6  # share of its bandwidth that a faulty side or link keeps
SLIGHTLY_LEFT = 0.86  # share that a slightly slow one keeps, in the middle of the range of WARN
SPREAD = 0.05  # each repetition loses |N(0, 1)| times this
REPETITIONS = 5  # the best counts
LEAST_NODES = 4  # with fewer, no spread can be estimated, so none is called slightly slow
POD = 4  # nodes per switch in clusters of up to 16 nodes; a quarter of the nodes in larger ones
FIRST_NIGHTS = ((64, 200), (256, 60), (1024, 10))  # nodes, and trials with a slow link
COLLISIONS = (0.02, 0.2)  # share of a screening's measurements that other traffic slows
SCREEN_SPREAD = 0.1  # SPREAD while all nodes send
GROUP_S = 5.0  # assumed: creating and destroying NCCL's groups of two for one round
GPU_GBYTES_PER_S = 12.5  # assumed: 100 Gbit/s for each GPU
MANY_NODES, MANY_SLOW = 1024, (16, 32, 64, 128)
ROUND_AGAIN_S = 5.5  # assumed: creating and destroying groups, and the messages
VISITS = 0.02  # probability that another job's traffic slows a measurement, alone or not
CROWDED = 0.3  # probability that the spine is congested in a round
CROWDED_LEFT = (0.4, 1.0)  # remaining share then: of all pairs of a round, or of the one measurement

Name = tuple[object, ...]


@dataclass(frozen=True)
class Truth:
    """Simulated cluster: speeds of sides and links as shares of the reference, and its faults."""

    transmit: np.ndarray
    receive: np.ndarray
    links: dict[tuple[int, int], float]
    names: frozenset[Name]


@dataclass
class Tally:
    """Counts over the trials of one case."""

    trials: int = 0
    exact: int = 0
    """Trials in which every fault was named with its kind, and nothing else."""
    found: int = 0
    faults: int = 0
    unseen_links: int = 0
    """Slow links between nodes that no round paired."""
    false_alarms: int = 0
    """Trials with at least one confirmed fault of a healthy part."""
    first_pass_false_alarms: int = 0
    """Trials in which the first pass alone would have named a healthy part."""
    false_warnings: int = 0
    """Trials in which a healthy part was confirmed as slightly slow."""
    warned: int = 0
    """Faults named as slightly slow."""
    undecided: int = 0
    """Trials with slow pairs that no fault explains."""
    again: list[int] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)


def draw(random: np.random.Generator, nodes: int, case: str, share: float = LEFT) -> Truth:
    """Draw faults of different nodes; with too few nodes a link may touch a slow one."""
    kinds = {"none": (), "two": tuple(random.choice(KINDS, 2))}.get(case, (case,))
    free = list(random.permutation(nodes))
    transmit, receive = np.ones(nodes), np.ones(nodes)
    links: dict[tuple[int, int], float] = {}
    names: set[Name] = set()
    for kind in sorted(kinds, key=lambda name: name == "link"):
        if kind == "link":
            ends = [free.pop() if free else None for _ in range(2)]
            other_nodes = [node for node in random.permutation(nodes) if node not in ends]
            a, b = sorted(int(end if end is not None else other_nodes.pop()) for end in ends)
            links[a, b] = links[b, a] = share
            names.add(("link", a, b))
            continue
        node = int(free.pop())
        if kind in ("node", "transmit"):
            transmit[node] = share
        if kind in ("node", "receive"):
            receive[node] = share
        names.add((kind, node))
    return Truth(transmit, receive, links, frozenset(names))


def measure(
    random: np.random.Generator,
    truth: Truth,
    rounds: Iterable[tuple[int, Iterable[tuple[int, int]]]],
    noise: str,
) -> list[Pair]:
    """Simulate the measurements of each round's pairs; ``rounds`` are (number, ordered pairs)."""
    nodes = len(truth.transmit)
    pod = POD if nodes <= 4 * POD else nodes // 4
    measured_pairs: list[Pair] = []
    for number, pairs in rounds:
        ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        src, dst = ends[:, 0], ends[:, 1]
        value = np.minimum(truth.transmit[src], truth.receive[dst])
        for index, pair in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
            if pair in truth.links:
                value[index] = min(value[index], truth.links[pair])
        lost = np.abs(random.normal(0, SPREAD, (REPETITIONS, len(value)))).min(axis=0)
        value = value * np.clip(1 - lost, 0.01, None)
        if noise == "shared spine" and random.random() < CROWDED:
            value = np.where(src // pod != dst // pod, value * random.uniform(*CROWDED_LEFT), value)
        if noise == "other jobs":
            share = random.uniform(*CROWDED_LEFT, len(value))
            value = np.where(random.random(len(value)) < VISITS, value * share, value)
        measured_pairs += [
            Pair(src=s, dst=d, round=number, gbytes_per_s=v)
            for s, d, v in zip(src.tolist(), dst.tolist(), value.tolist(), strict=True)
        ]
    return measured_pairs


def screened(random: np.random.Generator, truth: Truth, collisions: float) -> tuple[Pairs, ...]:
    """Simulate rounds after a screening; other traffic slows the share ``collisions`` of messages."""
    nodes = len(truth.transmit)
    value = np.minimum(truth.transmit[:, None], truth.receive[None, :])
    for (src, dst), remaining in truth.links.items():
        value[src, dst] = min(value[src, dst], remaining)
    place = np.arange(nodes)
    distances = np.arange(1, nodes)
    to, back = ((place[:, None] + sign * distances[None, :]) % nodes for sign in (1, -1))
    best = np.full((nodes, nodes - 1), np.inf)
    for _ in range(SCREEN_PASSES):
        loaded = value * np.clip(1 - np.abs(random.normal(0, SCREEN_SPREAD, value.shape)), 0.01, None)
        hit = random.random(value.shape) < collisions
        seconds = 1 / np.where(hit, loaded * random.uniform(*CROWDED_LEFT, value.shape), loaded)
        # A node sees the end of a turn: of what it sends and of what it receives
        best = np.minimum(best, np.maximum(seconds[place[:, None], to], seconds[back, place[:, None]]))
    return more_rounds(slow_pairs(rates(best, 10**9)))


def first_night(nodes: int, collisions: float, share: float | None, trials: int) -> dict[str, Any]:
    """Diagnose one link with the share ``share`` of its speed (None: healthy) on the first night."""
    named = false_alarms = 0
    rounds, alone = [], []
    for trial in range(trials):
        random = np.random.default_rng([nodes, round(100 * collisions), round(100 * (share or 0)), trial])
        truth = draw(random, nodes, "none" if share is None else "link", share or 1.0)
        more = screened(random, truth, collisions)
        _, diagnosis, repeated, _ = examine(random, truth, "independent", trial, more=more)
        named_faults = names(diagnosis, "confirmed")
        named += bool(truth.names) and truth.names <= named_faults
        false_alarms += bool(named_faults - truth.names)
        rounds.append(len(more))
        alone.append(repeated)
    return {
        "nodes": nodes,
        "collisions": collisions,
        "left": share,
        "trials": trials,
        "named": named / trials if share else None,
        "false_alarms": false_alarms / trials,
        "rounds_more": float(np.median(rounds)),
        "rounds_most": max(rounds),
        "alone_median": float(np.median(alone)),
        "alone_most": max(alone),
    }


def first_nights(share: float) -> list[dict[str, Any]]:
    rows = []
    for nodes, trials in FIRST_NIGHTS:
        for collisions in COLLISIONS:
            for left in (0.75, None):
                count = max(5, round(trials * share * (5 if left is None else 1)))
                rows.append(first_night(nodes, collisions, left, count))
                print(rows[-1], flush=True)
    return rows


def examine(
    random: np.random.Generator,
    truth: Truth,
    noise: str,
    seed: int,
    spec: float | None = None,
    more: tuple[Pairs, ...] = (),
) -> tuple[Diagnosis, Diagnosis, int, set[tuple[int, int]]]:
    """Return first and last diagnosis, the number of isolated measurements, and the pairs of the rounds."""
    nodes = len(truth.transmit)
    plan = (*schedule(nodes, seed=seed), *more)
    forward = [(2 * number, pairs) for number, pairs in enumerate(plan)]
    backward = [(2 * number + 1, [(b, a) for a, b in pairs]) for number, pairs in enumerate(plan)]
    measured = measure(random, truth, [*forward, *backward], noise)
    before = diagnosis = diagnose(measured, nodes, spec_gbytes_per_s=spec)
    repeated = 0
    # An isolated pair has the spine to itself among this job's pairs, but shares links with other jobs
    noise_alone = "independent" if noise == "shared spine" else noise
    for _ in range(PASSES):
        if not diagnosis.again:
            break
        alone = measure(random, truth, [(n, [pair]) for n, pair in enumerate(diagnosis.again)], noise_alone)
        measured += [
            Pair(src=pair.src, dst=pair.dst, round=pair.round, gbytes_per_s=pair.gbytes_per_s, alone=True)
            for pair in alone
        ]
        repeated += len(alone)
        diagnosis = diagnose(measured, nodes, spec_gbytes_per_s=spec)
    return before, diagnosis, repeated, {pair for pairs in plan for pair in pairs}


def names(diagnosis: Diagnosis, status: str, *, slight: bool = False) -> set[Name]:
    """Return the names of the faults with this status: failed ones, or slightly slow ones."""
    return {
        (fault.kind, fault.node)
        if fault.node is not None
        else ("link", *sorted((int(fault.src or 0), int(fault.dst or 0))))
        for fault in diagnosis.faults
        if fault.status == status and fault.slight == slight
    }


def tally(
    nodes: int, case: str, noise: str, trials: int, spec: float | None = None, share: float = LEFT
) -> Tally:
    count = Tally()
    for trial in range(trials):
        random = np.random.default_rng([nodes, CASES.index(case), NOISES.index(noise), trial])
        truth = draw(random, nodes, case, share)
        before, after, repeated, paired = examine(random, truth, noise, trial, spec)
        named_faults, warned = names(after, "confirmed"), names(after, "confirmed", slight=True)
        count.trials += 1
        count.exact += named_faults == truth.names
        count.faults += len(truth.names)
        count.found += len(named_faults & truth.names)
        count.unseen_links += sum(name[0] == "link" and name[1:] not in paired for name in truth.names)
        count.false_alarms += bool(named_faults - truth.names)
        count.first_pass_false_alarms += bool(names(before, "suspect") - truth.names)
        count.warned += len(warned & truth.names)
        count.false_warnings += bool(warned - truth.names)
        count.undecided += bool(after.undecided)
        count.again.append(repeated)
        count.wrong.update(str(name[0]) for name in named_faults - truth.names)
    return count


def trials_for(nodes: int, share: float) -> int:
    """Return the number of trials: fewer for large clusters, which take longer, but at least 20."""
    trials = 400 if nodes <= 16 else 200 if nodes <= 64 else 100 if nodes <= 256 else 50
    return max(20, round(trials * share))


def run(share: float, sizes: Iterable[int]) -> list[dict[str, Any]]:
    rows = []
    for nodes in sizes:
        cases: list[tuple[str, float | None]] = [(case, None) for case in CASES]
        if nodes == 3:
            cases.append(("two", 1.0))
        for noise in NOISES:
            for case, spec in cases:
                count = tally(nodes, case, noise, trials_for(nodes, share), spec)
                rows.append(_row(nodes, noise, case, spec, count))
                print(rows[-1], flush=True)
            for case in KINDS if nodes >= LEAST_NODES else ():
                count = tally(nodes, case, noise, trials_for(nodes, share), share=SLIGHTLY_LEFT)
                rows.append(_row(nodes, noise, f"{case}, a little", None, count))
                print(rows[-1], flush=True)
    return rows


def _row(nodes: int, noise: str, case: str, spec: float | None, count: Tally) -> dict[str, Any]:
    measured_faults = count.faults - count.unseen_links
    return {
        "nodes": nodes,
        "noise": noise,
        "faults": case,
        "reference_known": spec is not None,
        "trials": count.trials,
        "exact": count.exact / count.trials,
        "found": count.found / count.faults if count.faults else None,
        "found_of_measured": count.found / measured_faults if measured_faults else None,
        "false_alarms": count.false_alarms / count.trials,
        "warned_of_measured": count.warned / measured_faults if measured_faults else None,
        "false_warnings": count.false_warnings / count.trials,
        "false_alarms_without_second_pass": count.first_pass_false_alarms / count.trials,
        "left_undecided": count.undecided / count.trials,
        "reruns_median": float(np.median(count.again)),
        "reruns_most": max(count.again),
        "wrongly_named": dict(count.wrong),
    }


def markdown(report: dict[str, Any]) -> str:
    return "\n".join(
        [
            "# Diagnosis of simulated faults",
            "",
            f"`{report['command']}` {report['machine']['text']}; {report['seconds']:.0f} s.",
            "",
            f"A faulty side or link keeps {LEFT:.0%} of its bandwidth. Noise: best of {REPETITIONS}",
            f"repetitions, each of which loses |N(0, 1)| x {SPREAD:.0%}.",
            f"*Shared spine*: in {CROWDED:.0%} of the rounds all pairs between groups (of {POD} nodes, above",
            f"{4 * POD} nodes of a quarter of them) keep only one share of {CROWDED_LEFT[0]:.0%} to",
            f"{CROWDED_LEFT[1]:.0%}. *Other jobs*: {VISITS:.0%} of all measurements, also those alone, keep",
            "only such a share, drawn for each. Up to",
            f"{ALL_PAIRS_UP_TO} nodes every pair is measured, above that {ROUNDS_ABOVE} rounds: a slow link",
            "between nodes that were never paired cannot be found. *Two*: faults of random kinds at",
            "different nodes, if there are enough. No reference bandwidth is known unless stated.",
            "",
            "## Named exactly",
            "",
            "Share of the trials in which every fault was named with its kind, and nothing else.",
            "*Link, if measured*: the share found of the slow links between paired nodes.",
            "",
            *_table(report["rows"], "exact"),
            "",
            "## False alarms",
            "",
            "Share of the trials in which a healthy part was named. *One pass*: the worst column without",
            "the second measurement alone. *Re-run*: measurements alone with no fault, median and maximum.",
            "",
            *_table(report["rows"], "false_alarms"),
            "",
            "## Slightly slow",
            "",
            f"A faulty side or link keeps {SLIGHTLY_LEFT:.0%}: WARN. Share of those that were measured and",
            "are named with their kind. *False alarms*: trials in which a healthy part fails;",
            "*false warnings*: the largest share, over all cases, of trials in which a healthy part warns.",
            "",
            *_slight_table(report["rows"]),
            "",
            "With three nodes, two faults often look like another one: two slow links that share a node",
            "equal a slow node. Two slow nodes of three define the reference; with a",
            f"known reference {_three(report['rows'])} of such trials end with unexplained slow pairs.",
            "",
        ]
    )


def _table(rows: list[dict[str, Any]], value: str) -> list[str]:
    exact = value == "exact"
    extra = ["link, if measured"] if exact else ["one pass", "re-run"]
    heads = ["nodes", "noise", "trials", *CASES, *extra]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for nodes, noise in dict.fromkeys((row["nodes"], row["noise"]) for row in rows):
        mine = {
            row["faults"]: row
            for row in rows
            if (row["nodes"], row["noise"], row["reference_known"]) == (nodes, noise, False)
        }
        cells = [nodes, noise, mine["none"]["trials"], *(_percent(mine[case][value]) for case in CASES)]
        if exact:
            cells.append(_percent(mine["link"]["found_of_measured"]))
        else:
            cells.append(_percent(max(row["false_alarms_without_second_pass"] for row in mine.values())))
            cells.append(f"{mine['none']['reruns_median']:.0f}, {mine['none']['reruns_most']}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _slight_table(rows: list[dict[str, Any]]) -> list[str]:
    heads = ["nodes", "noise", "trials", *KINDS, "false alarms", "false warnings"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for nodes, noise in dict.fromkeys((row["nodes"], row["noise"]) for row in rows):
        same = {row["faults"]: row for row in rows if (row["nodes"], row["noise"]) == (nodes, noise)}
        slight = [same[f"{kind}, a little"] for kind in KINDS if f"{kind}, a little" in same]
        if slight:
            cells = [
                nodes,
                noise,
                slight[0]["trials"],
                *(_percent(row["warned_of_measured"]) for row in slight),
            ]
            cells.append(_percent(max(row["false_alarms"] for row in slight)))
            cells.append(_percent(max(row["false_warnings"] for row in same.values())))
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _three(rows: list[dict[str, Any]]) -> str:
    undecided = [row["left_undecided"] for row in rows if row["reference_known"]]
    return _percent(sum(undecided) / len(undecided)) if undecided else "(not run)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _command(command: str, share: float) -> str:
    return command if share == 1 else f"{command} --share {share:g}"


def measuring_minutes(nodes: int, more: int, alone: int) -> float:
    """Return the longest measuring time of profile ``standard``, from screening to single nodes."""
    both_ways = 2 * PAIR_REPETITIONS * EFFORTS["standard"].pair_cuda / 1e9 / GPU_GBYTES_PER_S
    measurements = ROUNDS_ABOVE + more + 2 * sharing.REPEATS + alone
    return (nodes * SCREEN_TURN_S + measurements * (GROUP_S + both_ways)) / 60


@functools.cache
def nights_until_all(nodes: int) -> int:
    """Return the number of nights after which the rounds have paired all nodes."""
    measured_pairs: set[tuple[int, int]] = set()
    for night in range(nodes):
        measured_pairs |= {pair for pairs in schedule(nodes, night=night) for pair in pairs}
        if len(measured_pairs) == nodes * (nodes - 1) // 2:
            return night + 1
    raise ValueError(f"{nodes} nights were not enough")


def first_night_markdown(report: dict[str, Any]) -> str:
    heads = ["nodes", "collisions", "link speed", "trials", "named", "false alarms"]
    heads += ["rounds of suspects", "alone", "minutes at most", "all pairs by rounds alone"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in report["rows"]:
        cells = [
            f"{row['nodes']:,}",
            f"{row['collisions']:.0%}",
            "all" if row["left"] is None else f"{row['left']:.0%}",
        ]
        cells += [row["trials"], _percent(row["named"]), _percent(row["false_alarms"])]
        cells.append(f"{row['rounds_more']:.0f}, {row['rounds_most']}")
        cells.append(f"{row['alone_median']:.0f}, {row['alone_most']}")
        minutes = measuring_minutes(row["nodes"], row["rounds_most"], row["alone_most"])
        cells.append(f"{minutes:.1f}")
        cells.append(f"{nights_until_all(row['nodes'])} nights")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(
        [
            "# A slow link's first night above 32 nodes, simulated",
            "",
            f"`{report['command']}` {report['machine']['text']}; {report['seconds']:.0f} s.",
            "",
            f"All pairs are timed at once, {SCREEN_PASSES} times in different orders; each message loses",
            f"|N(0, 1)| x {SCREEN_SPREAD:.0%}, and that share of them keeps only {CROWDED_LEFT[0]:.0%} to "
            f"{CROWDED_LEFT[1]:.0%}, as others",
            f"cross its path (*collisions*). Slow pairs get extra rounds (at most {MORE_ROUNDS}) after the",
            f"night's {ROUNDS_ABOVE}; then the diagnosis measures what is slow again alone. *Rounds of",
            "suspects* and *alone* (measurements of one direction): median and maximum. Without screening a",
            "night sees only the pairs of its rounds; the last column: nights until those cover",
            "all pairs.",
            "",
            f"*Minutes at most* is arithmetic for the profile `standard` on GPUs: {SCREEN_TURN_S:g} s of",
            f"screening for each node (its limit); each round and measurement alone {GROUP_S:g} s for its",
            f"groups (assumed) and {2 * PAIR_REPETITIONS} messages of "
            f"{EFFORTS['standard'].pair_cuda >> 20} MiB at",
            f"{8 * GPU_GBYTES_PER_S:g} Gbit/s for each GPU, with {2 * sharing.REPEATS} repeated rounds.",
            "",
            *lines,
            "",
        ]
    )


def many_slow() -> list[dict[str, Any]]:
    """Diagnose clusters of ``MANY_NODES`` nodes with many slow ones, measured again in groups."""
    rows = []
    for count in MANY_SLOW:
        slow = slow_nodes(MANY_NODES, count)
        start = time.perf_counter()
        measured = Measured(Cluster(nodes=MANY_NODES, transmit=slow, receive=slow))
        diagnosis = measured.diagnosed()
        named = set(diagnosis.bad_nodes)
        rows.append(
            {
                "slow": count,
                "named": len(named & set(slow)),
                "missed": len(set(slow) - named),
                "false": len(named - set(slow)),
                "rounds": measured.rounds,
                "minutes": measured.rounds * ROUND_AGAIN_S / 60,
                "seconds": time.perf_counter() - start,
            }
        )
    return rows


def many_slow_markdown(report: dict[str, Any]) -> str:
    lines = ["| slow nodes | named | missed | false | rounds again | minutes of the cluster | computed in |"]
    lines.append("|---" * 7 + "|")
    lines += [
        f"| {row['slow']} | {row['named']} | {row['missed']} | {row['false']} | {row['rounds']} "
        f"| {row['minutes']:.1f} | {row['seconds']:.1f} s |"
        for row in report["rows"]
    ]
    return "\n".join(
        [
            f"# Many slow nodes among {MANY_NODES:,}, simulated",
            "",
            f"`{report['command']}` {report['machine']['text']}.",
            "",
            "The slow nodes have 60% of their bandwidth. Suspects are measured again in groups; *minutes of "
            f"the cluster*: {ROUND_AGAIN_S:g} s for each round (assumed), of the phase's hour.",
            "",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of the trials to run; at least 20 each"
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of diagnosis.json and diagnosis.md")
    parser.add_argument(
        "--first-night", action="store_true", help="only the first night of large clusters, with screening"
    )
    parser.add_argument("--many-slow", action="store_true", help="only 1,024 nodes of which many are slow")
    chosen = parser.parse_args()
    start = time.perf_counter()
    if chosen.many_slow:
        report: dict[str, Any] = {"command": f"{COMMAND} --many-slow", "machine": describe()}
        report["rows"] = many_slow()
        (chosen.out / "many_slow.json").write_text(json.dumps(report, indent=1) + "\n")
        (chosen.out / "many_slow.md").write_text(many_slow_markdown(report))
        return
    if chosen.first_night:
        command = _command(f"{COMMAND} --first-night", chosen.share)
        report = {"command": command, "machine": describe()}
        report |= {"rows": first_nights(chosen.share), "seconds": time.perf_counter() - start}
        (chosen.out / "first_night.json").write_text(json.dumps(report, indent=1) + "\n")
        (chosen.out / "first_night.md").write_text(first_night_markdown(report))
        return
    rows = run(chosen.share, chosen.nodes)
    command = _command(COMMAND, chosen.share)
    seconds = time.perf_counter() - start
    report = {"command": command, "machine": describe(), "seconds": seconds, "rows": rows}
    (chosen.out / "diagnosis.json").write_text(json.dumps(report, indent=1) + "\n")
    (chosen.out / "diagnosis.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
