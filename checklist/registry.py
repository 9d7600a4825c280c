"""Registry of the checks: description, phase of measurement, and which later check clears a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from checklist.measurements import PHASES, PhaseName
from estimator.errors import UserError
from estimator.names import did_you_mean

Profile = Literal["quick", "standard", "deep"]
PROFILES: tuple[Profile, ...] = get_args(Profile)  # from the weakest to the strongest


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A health check with verdict PASS, WARN, FAIL or NO-VERDICT."""

    name: str
    phase: PhaseName | None
    """Phase that measures it; None: all phases."""
    description: str
    loaded: bool = False
    """Whether deeper profiles measure with more load, larger sizes or longer."""
    between: Literal["node", "pair", "world"] = "node"
    """Scope of a verdict: single nodes, pairs of nodes, or all ranks together."""

    def strength(self, profile: Profile) -> int:
        """Return the depth of the check in a profile; comparable within one check only."""
        return PROFILES.index(profile) if self.loaded else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalKind:
    """A metric that each rank measures by itself; higher is better."""

    name: str
    check: str
    unit: str
    description: str


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            name="ranks",
            phase="facts",
            description="number of nodes and GPUs as requested, without duplicates",
        ),
        Check(name="gpus", phase="facts", description="each node has all GPUs of its instance type"),
        Check(
            name="versions",
            phase="facts",
            description="same driver, CUDA, NCCL and torch versions on all nodes",
        ),
        Check(
            name="shared-memory",
            phase="facts",
            description="enough shared memory for NCCL and data loaders",
        ),
        Check(name="memlock", phase="facts", description="locked-memory limit high enough for RDMA"),
        Check(
            name="host-settings",
            phase="facts",
            description="kernel, CPU governor, huge pages, sysctls, limits, IOMMU and firmware as expected",
        ),
        Check(
            name="host-limits",
            phase="node",
            description="CPU quota, throttling, load and memory of each node, compared with its peers",
        ),
        Check(
            name="interface",
            phase="facts",
            description="NCCL and gloo use a network interface that reaches the other nodes",
        ),
        Check(
            name="rdma",
            phase="facts",
            description="EFA or InfiniBand devices visible, ports up and at full rate",
        ),
        Check(
            name="hostname",
            phase="facts",
            description="each host resolves its own name quickly to a non-loopback address",
        ),
        Check(name="clock", phase="facts", description="clocks of the hosts in sync"),
        Check(name="placement", phase="facts", description="all nodes of this run in one zone"),
        Check(
            name="gpu-health",
            phase="facts",
            description="ECC errors, remapped rows, XIDs, throttling, NVLinks, fabric; before and after",
        ),
        Check(
            name="mesh",
            phase="mesh",
            between="pair",
            description="every node sends 256 KB to every other node; round trips and second tries",
        ),
        Check(
            name="open-ports",
            phase="mesh",
            description="ports across the ephemeral range open between nodes, over IPv4 and IPv6",
        ),
        Check(
            name="dcgm",
            phase="diag",
            description="NVIDIA's DCGM diagnostic, level 2, if `dcgmi` is installed (`deep`)",
        ),
        Check(
            name="gemm",
            phase="node",
            loaded=True,
            description="speed of matrix products, compared with the GPU model and with peers",
        ),
        Check(
            name="gpu-load",
            phase="node",
            loaded=True,
            description="clocks, power limit, temperature, PCIe generation under load, compared with peers",
        ),
        Check(
            name="corruption",
            phase="node",
            loaded=True,
            description="bit-identical results of the same matrix product, repeatedly and on all ranks",
        ),
        Check(name="hbm", phase="node", loaded=True, description="GPU memory bandwidth, compared with peers"),
        Check(name="host-copy", phase="node", loaded=True, description="copy bandwidth between host and GPU"),
        Check(
            name="peer-copy",
            phase="node",
            loaded=True,
            description="copy bandwidth between the GPUs of a node (NVLink)",
        ),
        Check(name="efa", phase="node", description="EFA loopback messages on each host"),
        Check(
            name="storage",
            phase="node",
            loaded=True,
            description="read and write speed of the work directory, large and small files",
        ),
        Check(
            name="datastore", phase="node", loaded=True, description="read and write speed of the datastore"
        ),
        Check(
            name="correctness",
            phase="world",
            loaded=True,
            between="world",
            description="collectives return the exact expected values",
        ),
        Check(
            name="latency",
            phase="world",
            loaded=True,
            between="world",
            description="latency of small messages and of the barrier",
        ),
        Check(
            name="bandwidth",
            phase="world",
            loaded=True,
            between="world",
            description="bus bandwidth (busbw) of the collectives by message size",
        ),
        Check(
            name="transport",
            phase="world",
            between="world",
            description="NCCL connects all nodes and uses the fastest network available",
        ),
        Check(
            name="pairs",
            phase="pairs",
            loaded=True,
            between="pair",
            description="bandwidth of each pair of nodes and direction; names the slow node or link",
        ),
        Check(
            name="loss",
            phase="pairs",
            loaded=True,
            between="pair",
            description="packet loss, also across runs: retransmissions, port errors, carrier changes",
        ),
        Check(
            name="hangs",
            phase=None,
            between="world",
            description="no rank hung or died; every phase ended within its time limit",
        ),
    )
}

BY_NODE = ("efa", "storage", "datastore")  # checks measured by the first rank of each node only

LOCALS: dict[str, LocalKind] = {
    kind.name: kind
    for kind in (
        LocalKind(
            name="gemm_bf16",
            check="gemm",
            unit="TFLOPS",
            description="bf16 matrix product, fastest of a burst",
        ),
        LocalKind(
            name="gemm_bf16_sustained",
            check="gemm",
            unit="TFLOPS",
            description="bf16 matrix products sustained for seconds, at the power limit",
        ),
        LocalKind(name="gemm_fp32", check="gemm", unit="TFLOPS", description="fp32 matrix product"),
        LocalKind(
            name="hbm_copy", check="hbm", unit="GB/s", description="device-to-device copy, read plus write"
        ),
        LocalKind(
            name="memory_copy", check="hbm", unit="GB/s", description="host memory copy, read plus write"
        ),
        LocalKind(name="h2d", check="host-copy", unit="GB/s", description="pinned host memory to GPU"),
        LocalKind(name="d2h", check="host-copy", unit="GB/s", description="GPU to pinned host memory"),
        LocalKind(
            name="peer_copy", check="peer-copy", unit="GB/s", description="GPU to GPU of the same node"
        ),
        LocalKind(name="efa_loopback", check="efa", unit="GB/s", description="EFA loopback"),
        LocalKind(
            name="storage_write", check="storage", unit="GB/s", description="work directory, with fsync"
        ),
        LocalKind(
            name="storage_files",
            check="storage",
            unit="files/s",
            description="work directory: small files created, checked and removed",
        ),
        LocalKind(
            name="storage_read",
            check="storage",
            unit="GB/s",
            description="work directory, bypassing the page cache",
        ),
        LocalKind(
            name="datastore_write", check="datastore", unit="GB/s", description="datastore, one large object"
        ),
        LocalKind(
            name="datastore_read", check="datastore", unit="GB/s", description="datastore, the same object"
        ),
    )
}


def find(name: str) -> Check:
    """Return the check of that name. Raises UserError with the most similar name."""
    if name in CHECKS:
        return CHECKS[name]
    raise UserError(
        f"There is no check {name!r}.", f"{did_you_mean(name, CHECKS)} Checks: {', '.join(CHECKS)}.".lstrip()
    )


def select(only: Iterable[str] = (), skip: Iterable[str] = ()) -> tuple[Check, ...]:
    """Return the selected checks in order. "hangs" is always included, because it ends a run in time."""
    selected = {find(name).name for name in only} or set(CHECKS)
    selected -= {find(name).name for name in skip}
    if not selected - {"hangs"}:
        raise UserError("No check is selected.", "Give fewer names to --skip, or others to --only.")
    return tuple(check for check in CHECKS.values() if check.name in selected | {"hangs"})


def phases_of(checks: Iterable[Check]) -> tuple[PhaseName, ...]:
    """Return the phases that the checks need, in order. Facts are always included: they name the nodes."""
    phases = {check.phase for check in checks} | {"facts"}
    return tuple(phase for phase in PHASES if phase in phases)


def clears(
    passed: Check,
    passed_profile: Profile,
    failed: Check,
    failed_profile: Profile,
) -> bool:
    """Return whether a PASS may clear an earlier verdict: the same check in at least as deep a profile."""
    return passed.name == failed.name and passed.strength(passed_profile) >= failed.strength(failed_profile)
