"""The checks: what each tells, in which phase it is measured, and what may clear its verdict."""

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
    """One question that is answered with PASS, WARN, FAIL or NO-VERDICT."""

    name: str
    phase: PhaseName | None
    """Where it is measured; None: in every phase."""
    tells: str
    loaded: bool = False
    """Whether a deeper profile asks harder: more load, larger sizes, longer."""
    between: Literal["node", "pair", "world"] = "node"
    """What it judges: hosts one by one, pairs of them, or the world as a whole."""

    def strength(self, profile: Profile) -> int:
        """How hard the check asks in that profile; only comparable within one check."""
        return PROFILES.index(profile) if self.loaded else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalKind:
    """A figure that a rank measures alone; more is better in all of them."""

    name: str
    check: str
    unit: str
    tells: str


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(name="ranks", phase="facts", tells="as many nodes and GPUs as asked for, none counted twice"),
        Check(name="gpus", phase="facts", tells="each node has the GPUs that its machine type has"),
        Check(name="versions", phase="facts", tells="driver, CUDA, NCCL and torch are the same everywhere"),
        Check(
            name="shared-memory",
            phase="facts",
            tells="shared memory is large enough for NCCL and data loaders",
        ),
        Check(name="memlock", phase="facts", tells="memory can be locked, as RDMA needs"),
        Check(
            name="host-settings",
            phase="facts",
            tells="kernel, governor, huge pages, sysctls, limits, IOMMU, firmware are as they should be",
        ),
        Check(name="interface", phase="facts", tells="NCCL and gloo take an interface that reaches others"),
        Check(
            name="rdma",
            phase="facts",
            tells="the EFA or InfiniBand devices are in sight, their ports up and at full rate",
        ),
        Check(name="hostname", phase="facts", tells="each host resolves its own name, and not to loopback"),
        Check(name="clock", phase="facts", tells="the hosts' clocks agree"),
        Check(name="placement", phase="facts", tells="the nodes of this very run are in one zone"),
        Check(
            name="gpu-health",
            phase="facts",
            tells="ECC, remapped rows, XID, throttling, NVLinks and their fabric, before and after",
        ),
        Check(name="mesh", phase="mesh", between="pair", tells="every node reaches every other with 256 KB"),
        Check(
            name="open-ports",
            phase="mesh",
            tells="ports all over the kernel's range are open between nodes, over IPv4 and IPv6",
        ),
        Check(name="dcgm", phase="diag", tells="NVIDIA's own diagnostic, level 2, where `dcgmi` is (`deep`)"),
        Check(
            name="gemm",
            phase="node",
            loaded=True,
            tells="matrix products as fast as the GPU's and its peers'",
        ),
        Check(
            name="gpu-load",
            phase="node",
            loaded=True,
            tells="clocks, power limit, temperature and PCIe generation under load, beside its peers'",
        ),
        Check(
            name="corruption",
            phase="node",
            loaded=True,
            tells="the same matrix product has the same bits each time and on all ranks",
        ),
        Check(name="hbm", phase="node", loaded=True, tells="the GPU's memory is as fast as its peers'"),
        Check(name="host-copy", phase="node", loaded=True, tells="copies between host and GPU"),
        Check(
            name="peer-copy", phase="node", loaded=True, tells="copies between the GPUs of a node (NVLink)"
        ),
        Check(name="efa", phase="node", tells="EFA moves messages from each host to itself"),
        Check(
            name="storage",
            phase="node",
            loaded=True,
            tells="the work directory is written and read, large files and small ones",
        ),
        Check(name="datastore", phase="node", loaded=True, tells="the datastore is written and read"),
        Check(
            name="correctness",
            phase="world",
            loaded=True,
            between="world",
            tells="each collective gives values that a wrong or partial result can't give",
        ),
        Check(
            name="latency",
            phase="world",
            loaded=True,
            between="world",
            tells="small messages and the barrier take no longer than they should",
        ),
        Check(
            name="bandwidth",
            phase="world",
            loaded=True,
            between="world",
            tells="busbw of the collectives over message size",
        ),
        Check(
            name="transport",
            phase="world",
            between="world",
            tells="NCCL sees all nodes and uses the fast network that is there",
        ),
        Check(
            name="pairs",
            phase="pairs",
            loaded=True,
            between="pair",
            tells="every pair of nodes in each direction: which node, direction or link is slow",
        ),
        Check(
            name="loss",
            phase="pairs",
            loaded=True,
            between="pair",
            tells="packets arrive the first time, over nights too: retransmissions, ports' errors, carriers",
        ),
        Check(
            name="hangs", phase=None, between="world", tells="no rank hung or died, every phase ended in time"
        ),
    )
}

BY_NODE = ("efa", "storage", "datastore")  # checks whose figures each node's first rank measures alone

LOCALS: dict[str, LocalKind] = {
    kind.name: kind
    for kind in (
        LocalKind(
            name="gemm_bf16", check="gemm", unit="TFLOPS", tells="bf16 matrix product, the fastest of a burst"
        ),
        LocalKind(
            name="gemm_bf16_sustained",
            check="gemm",
            unit="TFLOPS",
            tells="bf16 matrix products for seconds, at the power limit",
        ),
        LocalKind(name="gemm_fp8", check="gemm", unit="TFLOPS", tells="fp8 matrix product"),
        LocalKind(name="gemm_fp32", check="gemm", unit="TFLOPS", tells="fp32 matrix product"),
        LocalKind(name="hbm_copy", check="hbm", unit="GB/s", tells="copy within the device, read plus write"),
        LocalKind(
            name="memory_copy", check="hbm", unit="GB/s", tells="copy within host memory, read plus write"
        ),
        LocalKind(name="h2d", check="host-copy", unit="GB/s", tells="pinned host memory to GPU"),
        LocalKind(name="d2h", check="host-copy", unit="GB/s", tells="GPU to pinned host memory"),
        LocalKind(name="peer_copy", check="peer-copy", unit="GB/s", tells="GPU to GPU of the same node"),
        LocalKind(name="efa_loopback", check="efa", unit="GB/s", tells="EFA, from the host to itself"),
        LocalKind(name="storage_write", check="storage", unit="GB/s", tells="work directory, with fsync"),
        LocalKind(
            name="storage_files",
            check="storage",
            unit="files/s",
            tells="small files of the work directory made, looked at and removed",
        ),
        LocalKind(name="storage_read", check="storage", unit="GB/s", tells="work directory, past the cache"),
        LocalKind(
            name="datastore_write", check="datastore", unit="GB/s", tells="datastore, one large object"
        ),
        LocalKind(name="datastore_read", check="datastore", unit="GB/s", tells="datastore, the same object"),
    )
}


def find(name: str) -> Check:
    """The check of that name. Raises UserError with the nearest name."""
    if name in CHECKS:
        return CHECKS[name]
    raise UserError(
        f"There is no check {name!r}.", f"{did_you_mean(name, CHECKS)} Checks: {', '.join(CHECKS)}.".lstrip()
    )


def select(only: Iterable[str] = (), skip: Iterable[str] = ()) -> tuple[Check, ...]:
    """The checks to do, in order. "hangs" can't be left out: it is what ends a run in time."""
    chosen = {find(name).name for name in only} or set(CHECKS)
    chosen -= {find(name).name for name in skip}
    if not chosen - {"hangs"}:
        raise UserError("No check is left to do.", "Give fewer names to --skip, or other ones to --only.")
    return tuple(check for check in CHECKS.values() if check.name in chosen | {"hangs"})


def phases_of(checks: Iterable[Check]) -> tuple[PhaseName, ...]:
    """The phases that those checks need, in order. Facts are always gathered: they name the nodes."""
    needed = {check.phase for check in checks} | {"facts"}
    return tuple(phase for phase in PHASES if phase in needed)


def clears(
    passed: Check,
    passed_profile: Profile,
    failed: Check,
    failed_profile: Profile,
) -> bool:
    """Whether a PASS of one check may clear an earlier verdict: the same check, asked at least as hard."""
    return passed.name == failed.name and passed.strength(passed_profile) >= failed.strength(failed_profile)
