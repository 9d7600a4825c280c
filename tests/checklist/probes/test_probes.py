"""What each probe says of this machine, and of what it is given."""

from __future__ import annotations

import dataclasses
import socket
import threading
from itertools import product

import pytest
import torch

from checklist.judges.gpus import NORMAL_THROTTLING
from checklist.measurements import Nic, Transport, record
from checklist.probes import gpus, nics, operations, transport
from checklist.probes.cloud import place
from checklist.probes.pairs import summary
from checklist.probes.progress import Progress
from checklist.probes.sockets import Sink, deliver
from decorators.backends import tables
from tests.checklist import runs

HOST = (
    Nic(name="docker0", addresses=("172.17.0.1",), up=True),
    Nic(name="eth0", addresses=("10.0.0.5", "fe80::1"), up=True),
    Nic(name="eth1", addresses=("10.1.0.5",), up=True),
    Nic(name="lo", addresses=("127.0.0.1",), up=True),
)


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        ("^docker,lo", "eth0"),
        ("eth1,eth0", "eth0"),
        ("docker0", "docker0"),
    ],
)
def test_nccls_interface_variable_is_read_as_nccl_reads_it(wanted: str, taken: str) -> None:
    choice = nics.choose("nccl", HOST, "10.0.0.1", {"NCCL_SOCKET_IFNAME": wanted})
    assert (choice.nic, choice.usable) == (taken, True)


def test_an_exclusion_passes_over_interfaces_that_nccl_can_not_use() -> None:
    """As the containers of several nodes on AWS Batch have them, with the variable that they get there."""
    host = (
        Nic(name="dummy0", addresses=(), up=True),
        Nic(name="ecs-eth0", addresses=("169.254.172.2",), up=True),
        Nic(name="eth0", addresses=("10.0.0.5",), up=True),
        Nic(name="lo", addresses=("127.0.0.1",), up=True),
    )
    [variable] = [row for row in tables.variables() if row.name == "NCCL_SOCKET_IFNAME"]
    choice = nics.choose("nccl", host, "10.0.0.1", {variable.name: variable.value})
    assert (choice.nic, choice.address, choice.usable) == ("eth0", "10.0.0.5", True)
    assert nics.choose("nccl", host, "10.0.0.1", {}).nic == "ecs-eth0"  # which is what the variable is for
    left = nics.choose("nccl", host, "10.0.0.1", {variable.name: "^eth,ecs,lo,dummy"})
    assert not left.usable
    assert "leaves no interface of this host" in left.reason


def test_without_a_variable_nccl_takes_neither_docker_nor_loopback() -> None:
    assert nics.choose("nccl", HOST, "10.0.0.1", {}).nic == "eth0"


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    choice = nics.choose("gloo", HOST, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"})
    assert not choice.usable
    assert "GLOO_SOCKET_IFNAME=ib0 names no interface of this host" in choice.reason
    assert "eth1" in choice.reason


def test_loopback_is_unusable_when_rank_0_is_elsewhere_and_right_when_it_is_not() -> None:
    variable = {"GLOO_SOCKET_IFNAME": "lo"}
    assert not nics.choose("gloo", HOST, "10.0.0.1", variable).usable
    assert nics.choose("gloo", HOST, "127.0.0.1", variable).usable


def test_a_host_name_that_does_not_resolve_leaves_gloo_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics, "own_address", lambda: None)
    choice = nics.choose("gloo", HOST, "10.0.0.1", {})
    assert (choice.nic, choice.usable) == ("lo", False)
    assert "can't be resolved" in choice.reason


def test_a_zone_that_is_not_known_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert place().zone is None
    monkeypatch.setenv("NODE_ZONE", "eu-west-1b")
    assert place().zone == "eu-west-1b"


NCCL_EFA = """
h:1:2 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
h:1:2 [0] NCCL INFO Using network AWS Libfabric
h:1:2 [0] NCCL INFO comm 0x5 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
h:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""
NCCL_SOCKET = """
h:1:2 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
h:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
h:1:2 [0] NCCL INFO Using network Socket
h:1:2 [0] NCCL INFO comm 0x5 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
h:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
NCCL_ALONE = """
h:1:2 [0] NCCL INFO Using network IB
h:1:2 [0] NCCL INFO comm 0x5 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0
h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


@pytest.mark.parametrize(
    ("log", "network", "nodes", "direct"),
    [
        (NCCL_EFA, "efa", 2, True),
        (NCCL_SOCKET, "socket", 2, False),
        (NCCL_ALONE, "shm", 1, None),
        ("", None, None, None),
    ],
)
def test_the_network_is_read_from_nccls_log(
    log: str, network: str | None, nodes: int | None, direct: bool | None
) -> None:
    said = transport.parse(log)
    assert (said["network"], said["nodes_seen"], said["gpu_direct"]) == (network, nodes, direct)


def test_the_interface_is_read_from_nccls_log() -> None:
    assert transport.parse(NCCL_SOCKET)["interface"] == "eth0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_a_sum_that_leaves_out_a_rank_or_takes_one_twice_is_seen(dtype: torch.dtype, world: int) -> None:
    made = operations._Maker(dtype, 4099, 0, world, torch.device("cpu"))
    indexes = torch.arange(4099)
    parts = [made.values(rank, indexes, made.addend) for rank in range(world)]
    right = sum(parts)
    assert torch.equal(made.summed(indexes), right)
    assert torch.equal(right.to(dtype).to(torch.int64), right), "exact in the type"
    for left_out, twice in product(range(min(world, 4)), repeat=2):
        assert not torch.equal(right - parts[left_out], right)
        if left_out != twice and made.addend > 1:
            assert not torch.equal(right - parts[left_out] + parts[twice], right)


def test_wrong_values_are_counted_and_nan_is_wrong() -> None:
    made = operations._Maker(torch.float32, 100, 0, 2, torch.device("cpu"))
    good = made.values(1, torch.arange(100)).to(torch.float32)
    bad = good.clone()
    bad[7] += 1
    nan = good.clone()
    nan[3] = float("nan")

    def work(got: torch.Tensor) -> operations.Work:
        return operations.Work(
            run=lambda: None, result=lambda: [got], expected=lambda _, i: made.values(1, i)
        )

    assert [operations.wrong_values(work(got)) for got in (good, bad, nan)] == [0, 1, 1]


def test_short_messages_are_sent_until_they_tell_of_the_network_and_not_of_the_processor() -> None:
    sink = Sink("127.0.0.1")
    sent = deliver(
        "127.0.0.1",
        sink.port,
        first=1000,
        then=lambda _: 5000,
        repetitions=3,
        least_s=0.2,
        connect_s=2,
        limit_s=30,
    )
    sink.close()
    assert len(sent.seconds) > 4
    assert sum(sent.seconds[1:-1]) < 0.2 <= sum(sent.seconds[1:])


def test_bytes_are_delivered_and_each_message_is_timed() -> None:
    sink = Sink("127.0.0.1")
    sent = deliver(
        "127.0.0.1", sink.port, first=1000, then=lambda _: 5000, repetitions=3, connect_s=2, limit_s=5
    )
    sink.close()
    assert (sent.connected, len(sent.seconds), sent.bytes, sent.error) == (True, 4, 5000, None)


def test_whoever_accepts_and_never_answers_is_given_up_at_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sent = deliver("127.0.0.1", silent.getsockname()[1], first=100, connect_s=2, limit_s=0.3)
    assert sent.connected
    assert sent.seconds == ()
    assert sent.error == "100 bytes: not within 0.3 s"


def test_a_port_where_nobody_listens_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    sent = deliver("127.0.0.1", port, first=100, connect_s=2, limit_s=1)
    assert not sent.connected
    assert "refused" in (sent.error or "")


def test_the_slow_messages_of_a_pair_are_not_hidden_by_the_best() -> None:
    best, slow = summary([0.1] * 17 + [1.0] * 3, 10**8)
    assert (best, slow) == pytest.approx((1.0, 0.1))


def test_progress_is_read_by_another_while_its_writer_is_busy(tmp_path: object) -> None:
    path = tmp_path / "rank0.progress"  # type: ignore[operator]
    reader = Progress(path, create=True)

    def write() -> None:
        writer = Progress(path)
        writer.name("all_reduce")
        for _ in range(5):
            writer.begin()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert reader.read() == ("all_reduce", 5)


NCCL_TUNING = """
h:1:2 [0] NCCL INFO AllReduce: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
h:1:2 [0] NCCL INFO AllReduce: 8388608 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
h:1:2 [0] NCCL INFO AllGather: 16777216 Bytes -> Algo Ring proto LL128 channel{Lo..Hi}={0..15}
"""


@pytest.mark.parametrize(
    ("log", "op", "chosen"),
    [
        (NCCL_TUNING, "all_reduce", ("NVLS", "SIMPLE")),
        (NCCL_TUNING, "all_gather", ("RING", "LL128")),
        (NCCL_TUNING, "send_recv", None),
        ("NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 286", "all_gather", ("RING", "SIMPLE")),
        ("h:1:2 [0] NCCL INFO 512 Bytes -> Algo 0 proto 0 time 12.5", "all_reduce", ("TREE", "LL")),
        (NCCL_EFA, "all_reduce", None),
    ],
)  # fmt: skip
def test_the_algorithm_and_protocol_are_those_of_the_largest_message_in_nccls_log(
    log: str, op: str, chosen: tuple[str, str] | None
) -> None:
    assert transport.chosen(log, op) == chosen


NCCL_EFA_SOCKETS = NCCL_SOCKET.replace("nRanks 2 ", "nRanks 16 ")
NCCL_GDR_OFF = NCCL_EFA.replace("/0/GDRDMA", "/0")
NCCL_TWO_WORLDS = NCCL_EFA.replace("nNodes 2", "nNodes 1").replace("nRanks 16", "nRanks 8")
NCCL_RANKS_MISSING = NCCL_EFA.replace("nRanks 16", "nRanks 14")


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        (NCCL_EFA, {}),
        (NCCL_EFA_SOCKETS, {"rdma-unused": "FAIL"}),
        (NCCL_GDR_OFF, {"gdr-off": "WARN"}),
        (NCCL_TWO_WORLDS, {"separate-world": "FAIL"}),
        (NCCL_RANKS_MISSING, {"separate-world": "FAIL"}),
    ],
    ids=["EFA with GPU Direct", "EFA but sockets", "GPU Direct off", "two worlds", "ranks missing"],
)
def test_nccls_log_is_judged_from_its_text_on(log: str, codes: dict[str, str]) -> None:
    run = runs.gpu_run()
    said = record(Transport, transport.parse(log))
    assert runs.codes(dataclasses.replace(run, transport=said)) == codes


def test_the_judge_calls_throttling_what_the_probe_calls_it() -> None:
    assert set(NORMAL_THROTTLING) <= set(gpus._THROTTLES.values())
    assert set(runs.healthy_gpu(0, 8, "after").throttle_reasons or ()) <= set(gpus._THROTTLES.values())
