"""Addresses and secret with which the processes of one run find and authenticate each other."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass, field

CLUSTER_PORTS = tuple(range(29400, 29408))  # a pod has its own network, where these are free
STORE_PORTS = tuple(range(29408, 29440))  # candidates for torch's store on a cluster (network-policy.yaml)
MAGIC = b"finetune-channel/1\n"  # protocol of launchers.cluster.greeting


def unused_port() -> int:
    """Return a TCP port that nothing on this machine's loopback interface uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def choose_ports(*, local: bool) -> tuple[int, ...]:
    """Return the ports where a run's nodes may meet: free ones if they share this machine's network."""
    if not local:
        return CLUSTER_PORTS
    return tuple(dict.fromkeys(unused_port() for _ in range(8)))


@dataclass(frozen=True)
class Secret:
    """Shared secret of a run's processes, excluded from logs, cards and tracebacks."""

    text: str = field(repr=False)

    @classmethod
    def make(cls) -> Secret:
        """Create a secret of 32 random bytes, as hexadecimal text."""
        return cls(secrets.token_hex(32))

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address of a run's listener, and the identity that both ends prove."""

    host: str  # name or address of the listener, as seen by callers
    ports: tuple[int, ...]  # candidate ports; the listener takes the first free one
    secret: Secret
    run: str  # run, step, attempt and purpose: proven along with the secret

    def prove(self, role: str, challenge: bytes, nonce: bytes, payload: bytes) -> bytes:
        """Compute the proof that this role knows the secret; ``challenge`` is the other end's nonce."""
        key = hmac.digest(self.secret.text.encode(), MAGIC + self.run.encode(), hashlib.sha256)
        return hmac.digest(key, role.encode() + b"\n" + challenge + nonce + payload, hashlib.sha256)


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """One node's position in its gang, and the address of node 0."""

    node: int  # 0: the main node
    nodes: int
    main_host: str  # name or address of node 0
    ports: tuple[int, ...]  # candidate ports of node 0; the first free one is taken
    secret: Secret  # of the run
    run: str  # run, step and attempt, so that nodes of another attempt cannot join
    join_timeout_s: float = 300.0  # maximum wait for the next node to join

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} of {self.nodes}: must be from 0 to nodes - 1")
        if self.nodes > 1 and not self.ports:
            raise ValueError("ports: give at least one port for more than one node")
        if self.nodes > 1 and not self.secret:
            raise ValueError("secret: more than one node must have one")

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of node 0's listener."""
        return Endpoint(host=self.main_host, ports=self.ports, secret=self.secret, run=self.run)
