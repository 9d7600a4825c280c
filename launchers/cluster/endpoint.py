"""Where the processes of one run meet, and the secret by which they know each other."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass, field

CLUSTER_PORTS = tuple(range(29400, 29408))  # a pod has its own network, where these are free
MAGIC = b"finetune-channel/1\n"  # the protocol of launchers.cluster.greeting


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
    """What the processes of one run know and nobody else; it shows in no log, card or traceback."""

    text: str = field(repr=False)

    @classmethod
    def make(cls) -> Secret:
        """A new secret of 32 random bytes, as hexadecimal text."""
        return cls(secrets.token_hex(32))

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the processes of a run meet, and what they prove to each other there."""

    host: str  # name or address of the one that listens, as the others reach it
    ports: tuple[int, ...]  # where it may listen; the first free one is taken
    secret: Secret
    run: str  # run, step, attempt and purpose: proven along with the secret

    def prove(self, role: str, challenge: bytes, nonce: bytes, said: bytes) -> bytes:
        """That whoever is in this role knows the secret; ``challenge`` is the other's nonce."""
        key = hmac.digest(self.secret.text.encode(), MAGIC + self.run.encode(), hashlib.sha256)
        return hmac.digest(key, role.encode() + b"\n" + challenge + nonce + said, hashlib.sha256)


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """One node's place in its gang."""

    node: int  # 0: the main node
    nodes: int
    main_host: str  # name or address of node 0
    ports: tuple[int, ...]  # where node 0 may listen; the first free one is taken
    secret: Secret  # of the run
    run: str  # run, step and attempt: another attempt's nodes are not joined
    patience_s: float = 300.0  # how long the nodes wait for one more of them to come

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} of {self.nodes}: must be from 0 to nodes - 1")
        if self.nodes > 1 and not self.ports:
            raise ValueError("ports: give at least one port for more than one node")
        if self.nodes > 1 and not self.secret:
            raise ValueError("secret: more than one node must have one")

    @property
    def endpoint(self) -> Endpoint:
        """Where the nodes meet."""
        return Endpoint(host=self.main_host, ports=self.ports, secret=self.secret, run=self.run)
