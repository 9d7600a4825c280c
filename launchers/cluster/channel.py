"""Where the nodes of one run meet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """One node's place in its gang."""

    node: int  # 0: the main node
    nodes: int
    main_host: str  # name or address of node 0
    ports: tuple[int, ...]  # where node 0 may listen; the first free one is taken
    token: str  # run, step and attempt (and a secret, if there is one): a stranger's gang is not joined

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} of {self.nodes}: must be from 0 to nodes - 1")
        if self.nodes > 1 and not self.ports:
            raise ValueError("ports: give at least one port for more than one node")
