"""Whole runs on separate hosts with one fault each: the right one is named, in bounded time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checklist import netns
from tests.checklist.netns import Bed, Job, bed

if TYPE_CHECKING:
    from collections.abc import Callable

    from checklist.result import Result

WHY_NOT = netns.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no separate hosts here: {WHY_NOT}")

NETWORK = ("--only", "ranks,interface,hostname,mesh,open-ports,pairs")
COLLECTIVES = ("--only", "correctness,bandwidth", "--profile", "standard", "--timeout", "60")
LIMIT_S = 240.0  # alone the longest case takes 48 s; the machine may be busy


def measured(
    folder: Path,
    hosts: int,
    fault: Callable[[Bed], object],
    *arguments: str,
    ipv6: bool = False,
    dual: bool = False,
    **more: object,
) -> Result:
    with bed(hosts, ipv6=ipv6, dual=dual) as made:
        fault(made)
        job = made.run(folder, *arguments, limit_s=LIMIT_S, **more)
        return told(made, job)


def told(made: Bed, job: Job) -> Result:
    """The result, once it is sure that every process ended by itself and left nothing."""
    codes = [process.returncode for process in job.processes]
    assert job.json.exists(), f"exit {codes}: {job.output()}"
    assert len(set(codes)) == 1, f"hosts end differently: {codes}"
    assert codes[0] == job.result.exit_code
    assert [made.pids(host) for host in range(made.hosts)] == [[]] * made.hosts
    return job.result


def nothing(_: Bed) -> None:
    """No fault."""


def named(result: Result, check: str) -> set[str]:
    """Nodes that findings of a check name, as culprits or as suspects."""
    found = [finding for finding in result.findings if finding.check == check]
    return {name for finding in found for name in (*finding.nodes, *finding.suspects)}


@pytest.mark.slow
def test_healthy_hosts_pass_every_phase_and_nobody_is_named(tmp_path: Path) -> None:
    result = measured(tmp_path, 3, nothing)

    assert result.verdict in ("PASS", "WARN"), result.headline
    assert result.findings == ()
    assert {phase.name for phase in result.measurements.phases if phase.status != "done"} == {"diag"}
    assert all(item.correct for item in result.measurements.collectives)


@pytest.mark.slow
@pytest.mark.nightly
def test_hosts_that_have_ipv6_alone_pass_every_phase(tmp_path: Path) -> None:
    result = measured(tmp_path, 3, nothing, ipv6=True)

    assert result.verdict in ("PASS", "WARN"), result.headline
    assert result.findings == ()
    assert {phase.name for phase in result.measurements.phases if phase.status != "done"} == {"diag"}
    addresses = {address for fact in result.measurements.facts for address in fact.addresses}
    assert not any("." in address for address in addresses if not address.startswith("127."))


def test_a_slow_host_is_named(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.slow(2, "50mbit"), *NETWORK)

    assert result.bad_nodes == ("h2",)
    assert [fault.kind for fault in result.diagnosis.with_status("confirmed")] == ["node"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "kind"),
    [("sends", "transmit"), pytest.param("receives", "receive", marks=pytest.mark.nightly)],
)
def test_a_host_that_is_slow_in_one_direction_is_named_with_the_direction(
    tmp_path: Path, side: str, kind: str
) -> None:
    def fault(made: Bed) -> None:
        made.slow(2, "50mbit", sends=side == "sends", receives=side == "receives")

    result = measured(tmp_path, 4, fault, *NETWORK)

    assert result.bad_nodes == ("h2",)
    assert [fault.kind for fault in result.diagnosis.with_status("confirmed")] == [kind]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_slow_link_is_named_and_neither_end_of_it_is_bad(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.slow_link(1, 3, "40mbit"), *NETWORK)

    assert result.verdict == "FAIL"
    assert named(result, "pairs") == {"h1", "h3"}
    assert result.bad_nodes == ()


LOSS = ("--only", "ranks,mesh,pairs,loss")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rate", "code", "level"),
    [
        pytest.param("200mbit", "crowded", "WARN", id="enough-for-one-pair-of-three"),
        pytest.param("60mbit", "slow-uplink", "FAIL", id="not-enough-for-one"),
    ],
)
def test_an_uplink_that_carries_too_little_is_named_and_none_of_its_hosts(
    rate: str, code: str, level: str, tmp_path: Path
) -> None:
    result = measured(tmp_path, 6, lambda made: made.divide(3, rate), *NETWORK)

    (fault,) = result.findings
    assert (fault.code, fault.verdict, fault.nodes) == (code, level, ())
    assert all((src in ("h0", "h1", "h2")) != (dst in ("h0", "h1", "h2")) for src, dst in fault.links)
    assert result.bad_nodes == ()


@pytest.mark.slow
def test_a_host_that_loses_packets_is_named_although_its_best_is_as_fast_as_ever(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.lose(2, 0.03), *LOSS)

    assert named(result, "loss") == {"h2"}
    fault = next(finding for finding in result.findings if finding.check == "loss")
    assert "is sent are lost" in fault.title
    assert any(counted.tcp_retransmitted for counted in result.measurements.counters if counted.node != 2)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_link_that_loses_packets_is_named_and_neither_end_of_it_is_bad(tmp_path: Path) -> None:
    def fault(made: Bed) -> None:
        made.lose(1, 0.04, sender=3)
        made.lose(3, 0.04, sender=1)

    result = measured(tmp_path, 4, fault, *LOSS)

    assert named(result, "loss") == {"h1", "h3"}
    assert result.bad_nodes == ()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_carrier_that_comes_and_goes_is_not_cleared_by_having_come_back(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.flap(2, 3, 3), *LOSS)

    assert result.verdict in ("WARN", "FAIL")
    assert "h2" in named(result, "loss") | named(result, "mesh")
    changes = {counted.node: counted.carrier_changes for counted in result.measurements.counters}
    assert (changes[0], changes[1], changes[3]) == (0, 0, 0)


@pytest.mark.slow
def test_a_cut_pair_is_named_by_the_mesh_in_seconds_and_no_collective_hangs_on_it(tmp_path: Path) -> None:
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
def test_a_pair_that_is_only_late_is_tried_again_and_not_named(tmp_path: Path) -> None:
    result = measured(tmp_path, 4, lambda made: made.cut_at_first(1, 3), "--only", "mesh")

    assert result.verdict == "PASS", result.headline
    assert "Connections that succeeded only on the second try: 1." in result.notes


@pytest.mark.slow
def test_a_part_of_the_ports_that_is_blocked_is_named_with_the_host_and_the_ports(tmp_path: Path) -> None:
    def fault(made: Bed) -> None:
        made.block_ports(2, "46884:60999")

    result = measured(tmp_path, 4, fault, "--only", "open-ports")
    (found,) = result.findings

    assert (found.verdict, found.nodes) == ("FAIL", ("h2",))
    assert "Into h2 these ports are blocked: about 46884 to 60999 (8 of 16 tried" in found.title


@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_of_two_families_of_which_one_is_blocked_is_named_and_the_run_goes_over_the_other(
    tmp_path: Path,
) -> None:
    result = measured(tmp_path, 3, lambda made: made.block_ipv6(1), *NETWORK, dual=True)
    (found,) = result.findings

    assert (found.verdict, found.suspects) == ("WARN", ("h1",))
    assert found.title == "h1 is not reached over IPv6, but over IPv4."


@pytest.mark.slow
@pytest.mark.nightly
def test_a_host_whose_name_leads_to_a_blocked_family_takes_part_and_is_told_what_works(
    tmp_path: Path,
) -> None:
    def fault(made: Bed) -> None:
        for host in range(3):
            both = [(made.ipv6_address(other), made.address(other), f"h{other}") for other in range(3)]
            ways = "".join(f"{ipv6} {name}\n{ipv4} {name}\n" for ipv6, ipv4, name in both)
            made.names(host, f"127.0.0.1 localhost\n{ways}")
        made.block_ipv6(2)

    master = {host: {"MASTER_ADDR": "h0"} for host in range(3)}
    result = measured(tmp_path, 3, fault, *NETWORK, dual=True, environment=master)

    assert len(result.measurements.facts) == 3
    assert "h2 is not reached over IPv6, but over IPv4." in [found.title for found in result.findings]


@pytest.mark.slow
@pytest.mark.nightly
def test_an_mtu_black_hole_shows_as_a_pair_that_connects_and_moves_nothing(tmp_path: Path) -> None:
    result = measured(tmp_path, 3, lambda made: made.black_hole(1, 2), "--only", "mesh,correctness")

    bad = [probe for probe in result.measurements.probes if probe.bulk_ok is False]
    assert {(probe.src, probe.dst) for probe in bad} == {(1, 2), (2, 1)}
    assert all(probe.connected for probe in bad)
    assert named(result, "mesh") == {"h1", "h2"}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_wrong_interface_is_named_by_those_who_cannot_reach_it(tmp_path: Path) -> None:
    own = {2: {"GLOO_SOCKET_IFNAME": "mgmt0"}}
    result = measured(tmp_path, 3, lambda made: made.other_nic(2), *NETWORK, environment=own)

    failed = {(probe.src, probe.dst) for probe in result.measurements.probes if not probe.connected}
    assert failed == {(0, 2), (1, 2)}
    assert result.bad_nodes == ("h2",)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_hosts_of_one_address_are_named_with_it_although_one_of_them_is_lost(tmp_path: Path) -> None:
    with bed(3) as made:
        made.on(2, "ip", "addr", "flush", "dev", "eth0")
        made.on(2, "ip", "addr", "add", f"{made.address(1)}/24", "dev", "eth0")
        result = made.run(tmp_path, "--only", "interface", limit_s=LIMIT_S).result

    titles = [found.title for found in result.findings]
    assert f"Duplicate address: h1 and h2 both have {made.address(1)}." in titles, titles


@pytest.mark.slow
@pytest.mark.nightly
def test_control_ports_that_are_dropped_are_told_from_a_host_that_is_gone(
    tmp_path: Path,
) -> None:
    with bed(2) as made:
        made.block_ports(0, "29517:29524")
        job = made.run(tmp_path, *NETWORK, limit_s=LIMIT_S)

    assert [process.returncode for process in job.processes] == [1, 2]
    assert "ports 29517 to 29524, could not be reached" in job.output(1)
    assert "The host answers on port 29500, so a firewall drops these" in job.output(1)
    assert any("to ports 29517 to 29524 of this host" in note for note in job.result.notes)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_runs_of_one_node_each_say_that_they_are_not_one_job(tmp_path: Path) -> None:
    with bed(2) as made:
        own = {host: {"RANK": "0", "MASTER_ADDR": made.address(host)} for host in range(2)}
        job = made.run(tmp_path, "--nodes", "2", *NETWORK, world=1, environment=own, limit_s=LIMIT_S)
        result = told(made, job)

    assert result.verdict == "FAIL"
    assert any("2 nodes asked for, 1 seen" in finding.title for finding in result.findings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind"),
    [(signal.SIGSTOP, "hang"), pytest.param(signal.SIGKILL, "died", marks=pytest.mark.nightly)],
)
def test_a_rank_that_hangs_or_dies_in_a_collective_is_named_with_it(
    tmp_path: Path, how: signal.Signals, kind: str
) -> None:
    with bed(3) as made:
        job = made.start(tmp_path, *COLLECTIVES, "--op-timeout", "8")
        worker = _in_collective(made, tmp_path, host=2)
        os.kill(worker, how)
        job.wait(LIMIT_S)
        result = told(made, job)

    hang = result.measurements.hangs[0]
    assert (hang.rank, hang.node, hang.phase, hang.kind) == (2, 2, "world", kind)
    assert hang.op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v")
    assert named(result, "hangs") == {"h2"}
    assert result.headline.startswith(f"Rank 2 (h2) {'hung' if kind == 'hang' else 'died'} in {hang.op}")
    if kind == "hang":
        # The others may be one collective apart: one of them had finished it when the rank stopped.
        recorded = r"the process is stopped; flight recorder: rank 0(, 1)? in collective \d+, gloo:\w+"
        assert re.search(recorded, str(hang.detail))
    assert any(item.seconds_median for item in result.measurements.collectives), "what was measured is kept"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_that_dies_between_two_operations_is_named_and_not_waited_for(tmp_path: Path) -> None:
    with bed(4) as made:
        job = made.start(tmp_path, *NETWORK, "--op-timeout", str(2 * LIMIT_S))  # a hang would not end here
        journal, deadline = tmp_path / "host2" / "rank2.jsonl", time.monotonic() + LIMIT_S
        while not (journal.exists() and b'"segments"' in journal.read_bytes()):
            assert time.monotonic() < deadline, "no pair was measured"
            time.sleep(0.02)
        os.kill(made.worker(2) or 0, signal.SIGKILL)
        job.wait(LIMIT_S)
        result = told(made, job)

    assert [(hang.rank, hang.phase, hang.kind) for hang in result.measurements.hangs] == [
        (2, "pairs", "died")
    ]
    assert {name for finding in result.findings for name in (*finding.nodes, *finding.suspects)} == {"h2"}


def _in_collective(made: Bed, folder: Path, host: int) -> int:
    """The worker of that host, once it times all_reduce."""
    progress = folder / f"host{host}" / f"rank{host}.progress"
    journal = folder / f"host{host}" / f"rank{host}.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        timing = journal.exists() and b'"seconds": [0.' in journal.read_bytes()
        if timing and b"all_reduce" in progress.read_bytes() and (worker := made.worker(host)):
            return worker
        time.sleep(0.02)
    raise AssertionError("no worker came as far as a collective")


@pytest.mark.slow
def test_a_host_that_is_gone_is_named_and_the_others_end_in_time(tmp_path: Path) -> None:
    with bed(3) as made:
        job = made.start(tmp_path, *COLLECTIVES, "--op-timeout", "8")
        _in_collective(made, tmp_path, host=2)
        for pid in made.pids(2):
            os.kill(pid, signal.SIGKILL)
        codes = job.wait(LIMIT_S)

    assert codes[:2] == [1, 1], job.output()
    hangs = job.result.measurements.hangs
    assert {hang.node for hang in hangs} == {2}
    assert {hang.kind for hang in hangs} <= {"lost", "died"}, "its worker may be the first that is killed"
