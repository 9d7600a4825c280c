"""Network, algorithm and protocol in the NCCL log, and their verdict."""

from __future__ import annotations

import dataclasses

import pytest

from checklist.checks.collectives import transport
from checklist.measurements import Transport, record
from tests.checklist import runs

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
    ("log", "read"),
    [
        (NCCL_EFA, ("efa", 2, True, None)),
        (NCCL_SOCKET, ("socket", 2, False, "eth0")),
        (NCCL_ALONE, ("shm", 1, None, None)),
        ("", (None, None, None, None)),
    ],
)
def test_the_network_is_read_from_the_nccl_log(log: str, read: tuple[object, ...]) -> None:
    fields = transport.parse(log)
    assert tuple(fields[name] for name in ("network", "nodes_seen", "gpu_direct", "interface")) == read


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
def test_algorithm_and_protocol_are_read_for_the_largest_message_in_the_nccl_log(
    log: str, op: str, chosen: tuple[str, str] | None
) -> None:
    assert transport.algorithm_of(log, op) == chosen


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
def test_a_fallback_to_sockets_in_the_nccl_log_is_judged(log: str, codes: dict[str, str]) -> None:
    run = runs.gpu_run()
    record_of_log = record(Transport, transport.parse(log))
    assert runs.codes(dataclasses.replace(run, transport=record_of_log)) == codes
