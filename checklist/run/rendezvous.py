"""Rendezvous data of one process: its ranks, the number of ranks, and rank 0's address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from estimator.errors import UserError
from launchers.cluster.allocation import expand_hosts, read_number
from launchers.cluster.endpoint import Endpoint, Secret

PORTS = 8  # number of candidate ports; the control channel uses the first free one
PORT_OFFSET = 17  # from MASTER_PORT, on which the launcher's own store may listen
DEFAULT_PORT = 29_500  # torchrun's
PORT_VARIABLE = "CHECKLIST_PORT"  # the first of the control channel's ports, the same for all of a job
SHARED_VARIABLE = "CHECKLIST_SECRET"  # the same for all of a job, and known to no one else
NO_SECRET = (
    f"Strangers on the network could take part in this run: set {SHARED_VARIABLE} to the same random text "
    "for all ranks."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Data that a process needs to take part. One process may supervise several ranks of its node."""

    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    world: int
    node: int
    nodes: int
    host: str
    """Name or address of rank 0's host, reachable from the other nodes."""
    ports: tuple[int, ...]
    """Candidate ports of rank 0's control channel."""
    secret: Secret
    """Secret shared by this run's processes; empty if the launcher provides none."""
    run: str
    """Name of the job, verified along with the secret so that another job is refused."""
    simulated: bool = False
    """Whether the "nodes" are process groups of one machine."""

    def __post_init__(self) -> None:
        if not self.ranks or len(self.ranks) != len(self.local_ranks):
            raise ValueError("ranks: give at least one, and a local rank for each")
        if not all(0 <= rank < self.world for rank in self.ranks):
            raise UserError(
                f"Rank {max(self.ranks)} is not below WORLD_SIZE {self.world}.",
                "RANK must be from 0 to WORLD_SIZE - 1: check how the job was started.",
            )
        if not 0 <= self.node < self.nodes:
            raise UserError(
                f"Node {self.node} is not among {self.nodes} nodes.",
                "The node's number must be from 0 to the number of nodes - 1.",
            )
        if not self.ports:
            raise ValueError("ports: give at least one")

    @property
    def is_leader(self) -> bool:
        """Whether rank 0, which coordinates the run, belongs to this process."""
        return 0 in self.ranks

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the processes: this machine's loopback if all of them run here."""
        host = "127.0.0.1" if self.nodes == 1 else self.host
        return Endpoint(host=host, ports=self.ports, secret=self.secret, run=f"checklist/{self.run}")

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values, for a child process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Rendezvous:
        """Restore from the values of :meth:`to_dict`."""
        tuples = {key: tuple(values[key]) for key in ("ranks", "local_ranks", "ports")}
        return cls(**{**values, **tuples, "secret": Secret(**values["secret"])})


def of_node(
    *,
    node: int,
    nodes: int,
    processes: int,
    host: str,
    port: int = DEFAULT_PORT,
    secret: Secret,
    run: str = "checklist",
    simulated: bool = False,
) -> Rendezvous:
    """Build the data of a process that supervises all ``processes`` ranks of its node, like a flow's task."""
    return Rendezvous(
        ranks=tuple(range(node * processes, (node + 1) * processes)),
        local_ranks=tuple(range(processes)),
        world=nodes * processes,
        node=node,
        nodes=nodes,
        host=host,
        ports=control_ports(port),
        secret=secret,
        run=run,
        simulated=simulated,
    )


def control_ports(port: int, environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Return the control channel's ports: from $CHECKLIST_PORT on, else next to the launcher's.

    Raises UserError for an impossible $CHECKLIST_PORT.
    """
    first = port + PORT_OFFSET
    if environment.get(PORT_VARIABLE):
        first = read_number(environment, PORT_VARIABLE)
        if not 1024 <= first <= 65_535 - PORTS:
            raise UserError(
                f"{PORT_VARIABLE}={first} is not possible: it is the first of {PORTS} ports.",
                f"Give a number from 1024 to {65_535 - PORTS}, the same for all ranks.",
            )
    return (
        tuple(range(first, first + PORTS)) if first + PORTS < 65_536 else tuple(range(20_000, 20_000 + PORTS))
    )


def from_environment(environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """Read the data from the variables of torchrun (or a compatible launcher) or srun; None without a
    launcher.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _slurm(environment)
    return None


def _torchrun(environment: Mapping[str, str]) -> Rendezvous:
    rank, world = read_number(environment, "RANK"), read_number(environment, "WORLD_SIZE")
    local_rank = read_number(environment, "LOCAL_RANK", 0)
    local_world = read_number(environment, "LOCAL_WORLD_SIZE", 1)
    return _one(
        rank=rank,
        local_rank=local_rank,
        world=world,
        node=read_number(environment, "GROUP_RANK", rank // max(1, local_world)),
        nodes=read_number(environment, "GROUP_WORLD_SIZE", max(1, world // max(1, local_world))),
        host=environment.get("MASTER_ADDR", "127.0.0.1"),
        ports=control_ports(read_number(environment, "MASTER_PORT", DEFAULT_PORT), environment),
        secret=Secret(environment.get(SHARED_VARIABLE, "")),
        run=environment.get("CHECKLIST_JOB") or environment.get("TORCHELASTIC_RUN_ID") or "checklist",
    )


def _slurm(environment: Mapping[str, str]) -> Rendezvous:
    host = environment.get("MASTER_ADDR")
    if not host:
        host = next(iter(expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))), None)
    if not host:
        raise UserError(
            "srun does not name the host of rank 0 (SLURM_STEP_NODELIST is empty).",
            "Set MASTER_ADDR to the first host of the job.",
        )
    return _one(
        rank=read_number(environment, "SLURM_PROCID"),
        local_rank=read_number(environment, "SLURM_LOCALID", 0),
        world=read_number(environment, "SLURM_NTASKS"),
        node=read_number(environment, "SLURM_NODEID", 0),
        nodes=read_number(environment, "SLURM_STEP_NUM_NODES", 1),
        host=host,
        ports=control_ports(read_number(environment, "MASTER_PORT", DEFAULT_PORT), environment),
        secret=Secret(environment.get(SHARED_VARIABLE, "")),
        run=f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}",
    )


def _one(
    *,
    rank: int,
    local_rank: int,
    world: int,
    node: int,
    nodes: int,
    host: str,
    ports: tuple[int, ...],
    secret: Secret,
    run: str,
) -> Rendezvous:
    return Rendezvous(
        ranks=(rank,),
        local_ranks=(local_rank,),
        world=world,
        node=node,
        nodes=max(nodes, node + 1),
        host=host,
        ports=ports,
        secret=secret,
        run=run,
    )
