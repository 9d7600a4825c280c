"""Parser of NCCL's log (NCCL_DEBUG=INFO) for the network, algorithm and protocol in use."""

from __future__ import annotations

import re
from typing import Any

_NODES = re.compile(r"\bnNodes (\d+)")
_RANKS = re.compile(r"\bn[rR]anks (\d+)")
_NETWORK = re.compile(r"Using network (.+)")
_SOCKET = re.compile(r"NET/Socket : Using (?:\[\d+\])?([^\s:\[]+):")
_PROVIDER = re.compile(r"Selected [Pp]rovider is (\w+)")
_PLUGIN = re.compile(r"(?:Loaded net plugin|Successfully loaded external plugin) (\S+)")
_VIA = re.compile(r"via (NET/.+|SHM\S*|P2P\S*)")  # a plugin's name may have spaces
_TELLING = (_NODES, _NETWORK, _SOCKET, _PROVIDER, _PLUGIN, _VIA, re.compile("GPU Direct RDMA"))
_MAX_LINES = 20
# "AllReduce: 4096 Bytes -> Algo Tree proto LL channel{Lo..Hi}={0..1}"; or numbers, no name (2.18)
_CHOICE = re.compile(r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")  # nccl_common.h
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_NCCL_NAMES = {  # other operations consist of sends and receives, without a choice of algorithm
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}


def algorithm_of(text: str, op: str) -> tuple[str, str] | None:
    """Return the algorithm and protocol of ``op``'s largest message in the log; None if not logged.

    NCCL logs them on rank 0 if NCCL_DEBUG_SUBSYS includes TUNING.
    """
    choices = [
        (int(size), _name(_ALGORITHMS, algorithm), _name(_PROTOCOLS, protocol))
        for name, size, algorithm, protocol in _CHOICE.findall(text)
        if op in _NCCL_NAMES and name in ("", _NCCL_NAMES[op])
    ]
    return max(choices)[1:] if choices else None


def _name(names: tuple[str, ...], number: str) -> str:
    return names[int(number)] if number.isdigit() and int(number) < len(names) else number.upper()


def parse(text: str) -> dict[str, Any]:
    """Return the fields of :class:`~checklist.measurements.Transport`; None for those not logged."""
    channels = _VIA.findall(text)
    networks = [channel for channel in channels if channel.startswith("NET/")]
    announced = _last(_NETWORK, text) or ""
    provider = _last(_PROVIDER, text)
    direct: bool | None = None
    if networks:
        direct = any("GDRDMA" in channel for channel in networks)
    elif "GPU Direct RDMA Disabled" in text:
        direct = False
    nodes, ranks = _last(_NODES, text), _last(_RANKS, text)
    lines = [line.strip() for line in text.splitlines() if any(pattern.search(line) for pattern in _TELLING)]
    return {
        "backend": "nccl",
        "nodes_seen": int(nodes) if nodes else None,
        "ranks_seen": int(ranks) if ranks else None,
        "network": _network(networks, channels, announced.strip(), provider),
        "interface": _last(_SOCKET, text),
        "plugin": _last(_PLUGIN, text),
        "gpu_direct": direct,
        "lines": lines[:_MAX_LINES],
    }


def _network(networks: list[str], channels: list[str], announced: str, provider: str | None) -> str | None:
    """Determine the network from channels between nodes if there are any, else from the selected network."""
    network = " ".join(dict.fromkeys(networks)) if networks else ("" if channels else announced)
    if "Socket" in network:  # a single socket channel slows down all
        return "socket"
    if "Libfabric" in network or "OFI" in network:
        return "efa" if provider == "efa" else "other"
    if "NET/IB" in network or network == "IB":
        return "ib"
    if network:
        return "other"
    return "shm" if channels else None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return str(matches[-1]) if matches else None
