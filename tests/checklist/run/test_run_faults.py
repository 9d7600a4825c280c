"""Complete runs on separate hosts with one fault each: the right one is named within a time limit."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import network_faults
from tests.checklist import netns
from tests.checklist.netns import BridgedHosts, bridged_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from checklist.result import Result

WHY_NOT = netns.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no separate hosts here: {WHY_NOT}")

NETWORK = ("--only", "ranks,interface,hostname,mesh,open-ports,pairs")
LIMIT_S = 240.0  # alone the longest case takes 48 s; the machine may be busy
EVERY_CHANGE = (
    "healthy",
    "slow host",
    "loses 3 % of its packets",
    "rank hangs",
)  # blocked ports: checks/network/test_open_ports_*.py
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in EVERY_CHANGE else pytest.mark.nightly)
    for case in network_faults.CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_within_the_time_limit_and_no_process_remains(
    case: network_faults.Case, tmp_path: Path
) -> None:
    if case.cgroups and not netns.cgroups_writable():
        pytest.skip("cgroups cannot be made here")
    run = network_faults.once(dataclasses.replace(case, limit_s=LIMIT_S), tmp_path)
    assert (run["ended"], run["right"], run["left"]) == (True, True, 0), run


def measured(
    folder: Path,
    hosts: int,
    fault: Callable[[BridgedHosts], object],
    *arguments: str,
    dual: bool = False,
    **overrides: Any,
) -> Result:
    """Return the result after checking that every process ended by itself and left nothing behind."""
    with bridged_hosts(hosts, dual=dual) as made:
        fault(made)
        job = made.run(folder, *arguments, limit_s=LIMIT_S, **overrides)
        codes = [process.returncode for process in job.processes]
        assert job.json.exists(), f"exit {codes}: {job.output()}"
        assert set(codes) == {job.result.exit_code}
        assert [made.pids(host) for host in range(hosts)] == [[]] * hosts
        return job.result


def named(result: Result, check: str) -> set[str]:
    """Return the nodes that findings of a check name as faulty or suspect."""
    findings = [finding for finding in result.findings if finding.check == check]
    return {name for finding in findings for name in (*finding.nodes, *finding.suspects)}


@pytest.mark.slow
def test_a_cut_pair_is_named_by_the_mesh_in_seconds_and_hangs_no_collective(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.cut(1, 3), "--only", "mesh,correctness")

    probes = result.measurements.probes
    assert {(probe.src, probe.dst) for probe in probes if not probe.connected} == {(1, 3), (3, 1)}
    assert named(result, "mesh") == {"h1", "h3"}
    mesh, world = result.measurements.phase("mesh"), result.measurements.phase("world")
    assert mesh.seconds < 60
    assert world.status == "skipped"
    assert "hang" in (world.reason or "")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_slow_connection_is_retried_and_not_named(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.drop_first_packets(1, 3), "--only", "mesh")

    assert result.verdict == "PASS", result.headline
    assert "Connections that succeeded only on the second try: 1." in result.notes


@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_with_a_blocked_address_family_joins_and_the_working_family_is_reported(
    tmp_path: Path,
) -> None:
    def fault(made: BridgedHosts) -> None:
        for host in range(3):
            both = [(made.ipv6_address(other), made.address(other), f"h{other}") for other in range(3)]
            ways = "".join(f"{ipv6} {name}\n{ipv4} {name}\n" for ipv6, ipv4, name in both)
            made.names(host, f"127.0.0.1 localhost\n{ways}")
        made.block_ipv6(2)

    master = {host: {"MASTER_ADDR": "h0"} for host in range(3)}
    result = measured(tmp_path, 3, fault, *NETWORK, dual=True, environment=master)

    assert len(result.measurements.facts) == 3
    assert "h2 is not reached over IPv6, only over IPv4." in [finding.title for finding in result.findings]


@pytest.mark.slow
@pytest.mark.nightly
def test_blocked_control_ports_are_distinguished_from_an_unreachable_host(
    tmp_path: Path,
) -> None:
    with bridged_hosts(2) as made:
        made.block_ports(0, "29517:29524")
        job = made.run(tmp_path, *NETWORK, limit_s=LIMIT_S)

    assert [process.returncode for process in job.processes] == [1, 2]
    assert "ports 29517 to 29524, could not be reached" in job.output(1)
    assert "The host answers on port 29500, so a firewall drops these" in job.output(1)
    assert any("at ports 29517 to 29524 of this host" in note for note in job.result.notes)


@pytest.mark.slow
def test_an_unreachable_host_is_named_and_all_others_end_within_the_time_limit(tmp_path: Path) -> None:
    with bridged_hosts(3) as made:
        job = made.start(tmp_path, *network_faults.WORLD)
        assert network_faults.wait_until(made, job, "collectives")
        for pid in made.pids(2):
            os.kill(pid, signal.SIGKILL)
        codes = job.wait(LIMIT_S)

    assert codes[:2] == [1, 1], job.output()
    hangs = job.result.measurements.hangs
    assert {hang.node for hang in hangs} == {2}
    assert {hang.kind for hang in hangs} <= {"lost", "died"}, "its worker may be the first that is killed"
