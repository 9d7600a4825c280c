"""Run every fault of the test bed several times: verdict, duration and false alarms.

    python -m benchmarks.network_faults [--repeats 5] [--healthy 20]   # as root, with iproute2 and iptables
    python -m benchmarks.network_faults --load 8 --repeats 3  # with processes that keep the processor busy
    python -m benchmarks.network_faults --many                # 34 hosts, of which not all pairs are measured
    python -m benchmarks.network_faults --only uplink         # cases with this in their name; other rows stay
    python -m benchmarks.network_faults --resume              # the runs that the results do not have yet

Writes benchmarks/results/network_faults.{json,md}, with --load network_faults_under_load, with --many
network_faults_many. Hosts are network namespaces, each limited to 200 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from checklist.result import Result
from tests.checklist import netns
from tests.checklist.netns import BridgedHosts, Job, bridged_hosts

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 150.0
MANY_LIMIT_S = 480.0
NETWORK = ("--only", "ranks,host-settings,interface,hostname,mesh,open-ports,pairs,loss")
LIMITS = (NETWORK[0], f"{NETWORK[1]},host-limits")
EXPECTED = "0.01"  # GB/s of all-reduce; a busy machine reaches 0.012 over links of 200 Mbit/s
SPEED = ("--only", "ranks,mesh,bandwidth,pairs", "--expect", EXPECTED)
WORLD = ("--only", "correctness,bandwidth", "--profile", "standard", "--timeout", "60", "--op-timeout", "15")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault, and the expected answer."""

    name: str
    hosts: int
    right: Callable[[Result], bool]
    fault: Callable[[BridgedHosts], object] = lambda _: None
    arguments: tuple[str, ...] = NETWORK
    environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    world: int | None = None
    strike: signal.Signals | None = None
    during: str = "collectives"
    """Measurement during which host 2's worker gets the signal: "collectives" or "pairs"."""
    ipv6: bool = False
    dual: bool = False
    cgroups: bool = False
    """Whether the fault is a limit of a cgroup."""
    limit_s: float = LIMIT_S


def _kinds(result: Result) -> list[str]:
    return [] if result.diagnosis is None else [f.kind for f in result.diagnosis.with_status("confirmed")]


def _blames(kind: str) -> Callable[[Result], bool]:
    return lambda result: result.bad_nodes == ("h2",) and _kinds(result) == [kind]


def _warns_only(*nodes: str) -> Callable[[Result], bool]:
    """Expect WARN about these nodes and no others."""
    return lambda result: (
        not result.bad_nodes
        and result.verdict == "WARN"
        and {n for f in result.findings for n in (*f.nodes, *f.suspects)} == {*nodes}
    )


def _suspects(check: str, *nodes: str) -> Callable[[Result], bool]:
    return lambda result: (
        not result.bad_nodes
        and {n for f in result.findings if f.check == check for n in (*f.nodes, *f.suspects)} == set(nodes)
    )


def _loses(*nodes: str) -> Callable[[Result], bool]:
    def right(result: Result) -> bool:
        loss_findings = [fault for fault in result.findings if fault.check == "loss"]
        return {n for fault in loss_findings for n in (*fault.nodes, *fault.suspects)} == set(nodes)

    return right


def _link_interrupted(host: str) -> Callable[[Result], bool]:
    """Expect a finding about the carrier of a host: down, or flapping if it was back at the inspection."""
    codes = (
        "carrier",
        "loss-intermittent",
        "loss-node",
        "loss-link",
        "nic-wrong",
        "node-unreachable",
        "pair-cut",
    )
    return lambda result: (
        result.verdict in ("WARN", "FAIL")
        and any(f.code in codes and host in (*f.nodes, *f.suspects) for f in result.findings)
        and set(result.bad_nodes) <= {host}
    )


def _slowest(result: Result) -> dict[str, float]:
    """Return how far the slowest message of any pair is behind the pair's best, and the retransmissions."""
    first = [p for p in result.measurements.pairs if p.gbytes_per_s and p.gbytes_per_s_p95 and p.bytes]
    if not first:
        return {}
    held = [
        float(p.bytes or 0) / 1e9 * (1 / (p.gbytes_per_s_p95 or 1) - 1 / (p.gbytes_per_s or 1)) for p in first
    ]
    return {
        "pairs": len(first),
        "least_share": round(min((p.gbytes_per_s_p95 or 0) / (p.gbytes_per_s or 1) for p in first), 3),
        "held_up_s": round(max(held), 3),
        "sent_again": round(max((p.retransmitted or 0) / (p.segments or 1) for p in first), 5),
    }


def _has_title(words: str, *bad: str) -> Callable[[Result], bool]:
    """Expect one finding with these words, and no other bad nodes."""
    return lambda result: result.bad_nodes == bad and any(words in fault.title for fault in result.findings)


def _each(*faults: Callable[[BridgedHosts], object]) -> Callable[[BridgedHosts], object]:
    """Combine faults."""
    return lambda made: [fault(made) for fault in faults]


def _all_slow(made: BridgedHosts) -> None:
    for host in range(made.hosts):
        made.slow(host, "25mbit")


def _renamed(made: BridgedHosts) -> None:
    made.called[2] = "h1"
    made.names(2, f"127.0.0.1 localhost\n{made.address(2)} h1\n{made.address(0)} h0\n")


def _readdressed(made: BridgedHosts) -> None:
    made.on(2, "ip", "addr", "flush", "dev", "eth0")
    made.on(2, "ip", "addr", "add", f"{made.address(1)}/24", "dev", "eth0")


def _limits(code: str) -> Callable[[Result], bool]:
    """Expect findings about host 2 only, one of them its cgroup's limit."""
    return lambda result: (
        {n for f in result.findings for n in (*f.nodes, *f.suspects)} == {"h2"}
        and any(f.code == code for f in result.findings)
    )


def _hung(kind: str) -> Callable[[Result], bool]:
    return lambda result: (
        result.bad_nodes == ("h2",)
        and [(hang.node, hang.kind) for hang in result.measurements.hangs] == [(2, kind)]
    )


CASES = (
    Case(name="healthy", hosts=3, right=lambda r: not r.findings, arguments=()),
    Case(name="healthy, network only", hosts=4, right=lambda r: not r.findings),
    Case(name="slow host", hosts=4, right=_blames("node"), fault=lambda b: b.slow(2, "50mbit")),
    Case(
        name="sends slowly",
        hosts=4,
        right=_blames("transmit"),
        fault=lambda b: b.slow(2, "50mbit", receives=False),
    ),
    Case(
        name="receives slowly",
        hosts=4,
        right=_blames("receive"),
        fault=lambda b: b.slow(2, "50mbit", sends=False),
    ),
    Case(
        name="slow link",
        hosts=4,
        right=_suspects("pairs", "h1", "h3"),
        fault=lambda b: b.slow_link(1, 3, "40mbit"),
    ),
    Case(name="host at 90 %", hosts=4, right=_warns_only("h2"), fault=lambda b: b.slow(2, "180mbit")),
    Case(name="host at 95 %", hosts=4, right=lambda r: not r.findings, fault=lambda b: b.slow(2, "190mbit")),
    Case(name="host at 85 %", hosts=4, right=_warns_only("h2"), fault=lambda b: b.slow(2, "170mbit")),
    Case(
        name="link at 85 %",
        hosts=4,
        right=_warns_only("h1", "h3"),
        fault=lambda b: b.slow_link(1, 3, "170mbit"),
    ),
    Case(
        name="uplink at 30 %",
        hosts=6,
        right=lambda r: not r.bad_nodes and [f.code for f in r.findings] == ["slow-uplink"],
        fault=lambda b: b.divide(3, "60mbit"),
    ),
    Case(
        name="uplink that three share",
        hosts=6,
        right=lambda r: (
            not r.bad_nodes and [(f.code, f.verdict) for f in r.findings] == [("crowded", "WARN")]
        ),
        fault=lambda b: b.divide(3, "200mbit"),
    ),
    Case(
        name="only inbound is blocked",
        hosts=4,
        right=lambda r: r.bad_nodes == ("h2",) and "only inbound is blocked" in r.headline,
        fault=lambda b: b.block_inbound(2),
    ),
    Case(
        name="half of the ports are blocked",
        hosts=4,
        right=_has_title("Into h2 these ports are blocked: about 46884 to 60999", "h2"),
        fault=lambda b: b.block_ports(2, "46884:60999"),
    ),
    Case(
        name="one of two families is blocked",
        hosts=4,
        right=_has_title("h2 is not reached over IPv6, only over IPv4."),
        fault=lambda b: b.block_ipv6(2),
        dual=True,
    ),
    Case(
        name="duplicate host name",
        hosts=3,
        right=_has_title("Duplicate host name: different hosts are called h1: h1 (node 1), h1 (node 2)"),
        fault=_renamed,
    ),
    Case(
        name="duplicate address",
        hosts=3,
        right=lambda r: any("Duplicate address: h1 and h2 both have" in f.title for f in r.findings),
        fault=_readdressed,
    ),
    Case(
        name="host set up otherwise",
        hosts=4,
        right=_warns_only("h2"),
        fault=lambda b: b.on(2, "sysctl", "-qw", "net.core.somaxconn=128"),
    ),
    Case(name="loses 3 % of its packets", hosts=4, right=_loses("h2"), fault=lambda b: b.lose(2, 0.03)),
    Case(
        name="link that loses 4 %",
        hosts=4,
        right=_loses("h1", "h3"),
        fault=_each(lambda b: b.lose(1, 0.04, sender=3), lambda b: b.lose(3, 0.04, sender=1)),
    ),
    Case(
        name="carrier that comes and goes",
        hosts=4,
        right=_link_interrupted("h2"),
        fault=lambda b: b.flap(2, 3, 3),
    ),
    Case(name="cut pair", hosts=4, right=_suspects("mesh", "h1", "h3"), fault=lambda b: b.cut(1, 3)),
    Case(
        name="MTU black hole",
        hosts=3,
        right=_suspects("mesh", "h1", "h2"),
        fault=lambda b: b.drop_large_packets(1, 2),
    ),
    Case(name="rank hangs", hosts=3, right=_hung("hang"), arguments=WORLD, strike=signal.SIGSTOP),
    Case(name="rank dies", hosts=3, right=_hung("died"), arguments=WORLD, strike=signal.SIGKILL),
    Case(
        name="rank dies while pairs are measured",
        hosts=4,
        right=lambda r: {n for f in r.findings for n in (*f.nodes, *f.suspects)} == {"h2"},
        strike=signal.SIGKILL,
        during="pairs",
    ),
    Case(name="healthy, IPv6 alone", hosts=3, right=lambda r: not r.findings, arguments=(), ipv6=True),
    Case(
        name="slow host, IPv6 alone",
        hosts=4,
        right=_blames("node"),
        fault=lambda b: b.slow(2, "50mbit"),
        ipv6=True,
    ),
    Case(
        name="wrong interface",
        hosts=3,
        right=lambda r: r.bad_nodes == ("h2",),
        fault=lambda b: b.other_nic(2),
        environment={2: {"GLOO_SOCKET_IFNAME": "mgmt0"}},
    ),
    Case(
        name="unresolvable host name",
        hosts=3,
        right=_suspects("hostname", "h2"),
        fault=lambda b: b.names(2, "127.0.0.1 localhost\n"),
    ),
    Case(
        name="slow name resolution",
        hosts=3,
        right=_warns_only("h2"),
        fault=lambda b: b.slow_names(2, 4),
    ),
    Case(
        name="CPU quota of 30 %",
        hosts=4,
        right=_limits("cpu-limit"),
        fault=lambda b: b.confine(2, cpus=0.3),
        arguments=LIMITS,
        cgroups=True,
    ),
    Case(
        name="memory limit of 400 MiB",
        hosts=4,
        right=_limits("memory-limit"),
        fault=lambda b: b.confine(2, memory_bytes=400 << 20),
        arguments=LIMITS,
        cgroups=True,
    ),
    Case(name="all hosts as expected", hosts=4, right=lambda r: not r.findings, arguments=SPEED),
    Case(
        name="all hosts at 12 %, speed expected",
        hosts=4,
        right=lambda r: r.verdict == "FAIL" and not r.bad_nodes and f"of {EXPECTED} expected" in r.headline,
        fault=_all_slow,
        arguments=SPEED,
    ),
    Case(
        name="all hosts at 12 %, speed unknown",
        hosts=4,
        right=lambda r: "speed not judged" in r.headline,
        fault=_all_slow,
    ),
    Case(
        name="two runs of one node",
        hosts=2,
        right=lambda r: any("1 seen" in finding.title for finding in r.findings),
        arguments=("--nodes", "2", *NETWORK),
        environment={0: {"RANK": "0"}, 1: {"RANK": "0", "MASTER_ADDR": "10.77.0.11"}},
        world=1,
    ),
)


MANY = (
    Case(name="healthy", hosts=34, right=lambda r: not r.findings, limit_s=MANY_LIMIT_S),
    Case(
        name="slow host, and another that sends slowly",
        hosts=34,
        right=lambda r: r.bad_nodes == ("h20", "h5") and sorted(_kinds(r)) == ["node", "transmit"],
        fault=_each(lambda b: b.slow(5, "50mbit"), lambda b: b.slow(20, "50mbit", receives=False)),
        limit_s=MANY_LIMIT_S,
    ),
)


def once(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case once; return whether the answer was right, its duration, and processes left behind."""
    with bridged_hosts(case.hosts, ipv6=case.ipv6, dual=case.dual) as made:
        case.fault(made)
        job = made.start(folder, *case.arguments, environment=case.environment, world=case.world)
        if case.strike is not None and (worker := wait_until(made, job, case.during)):
            os.kill(worker, case.strike)
        codes = job.wait(case.limit_s)
        left = sum(len(made.pids(host)) for host in range(case.hosts))
        ended = -9 not in codes and job.json.exists()
        result = job.result if ended else None
    return {
        "right": result is not None and case.right(result),
        "ended": ended,
        "seconds": round(job.seconds, 1),
        "left": left,
        "verdict": result.verdict if result else None,
        "headline": result.headline if result else None,
        **({} if result is None else _slowest(result)),
    }


def wait_until(bridged_hosts: BridgedHosts, job: Job, during: str) -> int | None:
    """Return host 2's worker process once it times collectives or pairs; None if the run ends before."""
    journal = job.keep / "host2" / "rank2.jsonl"
    sign = {"collectives": b'"seconds": [0.', "pairs": b'"segments"'}[during]
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.processes[2].poll() is None:
        if journal.exists() and sign in journal.read_bytes() and (worker := bridged_hosts.worker(2)):
            return worker
        time.sleep(0.02)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--only", default="", help="only cases with this in their name; other rows stay")
    parser.add_argument(
        "--load", type=int, default=0, help="processes that keep the processor busy meanwhile"
    )
    parser.add_argument("--resume", action="store_true", help="skip the runs that the results have already")
    parser.add_argument("--many", action="store_true", help="34 hosts, two minutes a run")
    options = parser.parse_args()
    why_not = netns.missing()
    if why_not is not None:
        sys.exit(f"No separate hosts here: {why_not}.")
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    try:
        _measure(options)
        print((RESULTS / f"{_table(options)}.md").read_text())
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _measure(options: argparse.Namespace) -> None:
    stored = _stored(options) if options.resume else {}
    for case in MANY if options.many else CASES:
        if options.only not in case.name:
            continue
        runs = list(stored[case.name]["runs"]) if case.name in stored else []
        while len(runs) < (options.healthy if case.name.startswith("healthy") else options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(once(case, Path(folder)))
            print(case.name, runs[-1], flush=True)
            _keep(options, {"case": case.name, "hosts": case.hosts, "runs": runs})


def _table(options: argparse.Namespace) -> str:
    """Return the name of the files in benchmarks/results."""
    return "network_faults" + ("_many" if options.many else "") + ("_under_load" if options.load else "")


def _keep(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Replace a row of the results file."""
    rows = {**_stored(options), row["case"]: row}
    order = [case.name for case in (MANY if options.many else CASES)]
    _write(options, _table(options), [rows[case] for case in order if case in rows])


def _stored(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the rows of the results file by case."""
    file = RESULTS / f"{_table(options)}.json"
    rows = json.loads(file.read_text())["cases"] if file.exists() else []
    return {row["case"]: row for row in rows}


def _write(arguments: argparse.Namespace, name: str, table: list[dict[str, Any]]) -> None:
    options = (" --many" if arguments.many else "") + (f" --load {arguments.load}" if arguments.load else "")
    command = f"python -m benchmarks.network_faults{options} --repeats {arguments.repeats}"
    command += f" --healthy {arguments.healthy}"
    report = {"command": command, "machine": describe(), "cases": table}
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [
        "# Faults of a network, named",
        "",
        f"`{command}`, {describe()['text']}. Hosts are network namespaces, each limited to 200 Mbit/s.",
        "",
        "| Case | Hosts | Runs | Right | Seconds, median | Most | Processes left |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        seconds = [run["seconds"] for run in row["runs"]]
        right, left = (sum(run[key] for run in row["runs"]) for key in ("right", "left"))
        lines.append(
            f"| {row['case']} | {row['hosts']} | {len(seconds)} | {right} | {statistics.median(seconds):.1f} "
            f"| {max(seconds):.1f} | {left} |"
        )
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
