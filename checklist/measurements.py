"""Raw measurements of the probes, without verdicts. Frozen records that round-trip through JSON losslessly.

``None`` means "not measured" or "not available", never zero. Nodes and ranks count from 0; a node is a
host, a rank one process of the job (one GPU; on CPUs, one process of a host). Bandwidths are in 10^9 bytes
a second, sizes in bytes, times in seconds.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from estimator.errors import UserError
from estimator.untrusted import parse_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 2
PhaseName = Literal["facts", "mesh", "diag", "node", "world", "pairs"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)  # in order of execution
NO_FOLDER = "there is no folder"  # prefix of the error of a Local without its folder
NO_TOOL = "there is no"  # prefix of the error of a Local without the measuring program
SAME_AS_RANK = "the same as rank"  # replaces equal host settings in the result of a large run
CPU = "cpu"  # name of the processor's model among a host's settings; identifies the kind of a host
PARAMETER = "kernel parameter "  # prefix of a kernel parameter among a host's settings
COMMAND_LINE = "kernel parameters"  # "read" if readable; then missing parameters are known to be unset
IDLE = "nothing"  # operation of a Hang that occurred between two operations
NOT_REQUESTED = "not requested"  # reason of a phase that no selected check needs
BROKEN_OFF = "it had not ended when the run was broken off"  # default reason of an unfinished Phase
R = TypeVar("R")
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}
REPORTED = {
    **STRICT,
    "allow_inf_nan": True,
}  # reported by a rank: analysis/soundness.py removes impossible values


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """One network interface of a host."""

    __pydantic_config__ = REPORTED
    name: str
    addresses: tuple[str, ...] = ()
    mtu: int | None = None
    gbps: float | None = None
    """Line rate in 10^9 bits a second; None if the kernel does not know it."""
    up: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaPort:
    """One port of an InfiniBand, RoCE or EFA device, with the kernel's terms."""

    __pydantic_config__ = REPORTED
    name: str
    """Device and number of the port: "mlx5_0/1"."""
    model: str | None = None
    """Board, or the driver's name of the chip."""
    state: str | None = None
    """"ACTIVE" if packets pass; else "DOWN", "INIT" or "ARMED"."""
    physical: str | None = None
    """"LinkUp"; "Polling" or "Disabled" without a link."""
    gbps: float | None = None
    """Trained link rate in 10^9 bits a second."""
    layer: str | None = None
    """"InfiniBand" or "Ethernet"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Host, devices and software of one rank."""

    __pydantic_config__ = REPORTED
    rank: int
    node: int
    """Node of this rank according to the launcher; boot_id verifies it."""
    local_rank: int
    hostname: str
    boot_id: str | None = None
    """Kernel's boot id, equal for all ranks of a host regardless of container hostnames."""
    uptime_s: float | None = None
    """Seconds since the host booted; reported only by the first rank of each node."""
    node_name: str | None = None
    """The cluster's name of the host (NODE_NAME of the pod, or the instance id); the hostname if unknown."""
    addresses: tuple[str, ...] = ()
    nic: str | None = None
    """Interface that NCCL or gloo will use."""
    nic_reason: str | None = None
    """Reason for that choice: the variable that names it, or its route."""
    nics: tuple[Nic, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    """All GPUs visible to this rank; its own is at the index of its local rank."""
    gpu_names: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    """torch, cuda, nccl, driver, python, kernel, image, efa-installer; None if unknown."""
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    """RLIMIT_MEMLOCK, soft; -1: unlimited."""
    clock_unix: float | None = None
    clock_offset_s: float | None = None
    """This host's clock minus rank 0's, from a round trip."""
    clock_offset_error_s: float | None = None
    """Half the shortest round trip: maximum error of clock_offset_s."""
    zone: str | None = None
    instance_type: str | None = None
    placement_group: str | None = None
    network_nodes: tuple[str, ...] = ()
    """Network units that contain the host, largest first, from node labels."""
    switches: tuple[str, ...] = ()
    """Switches next to the host's ports, from LLDP; reported only by the first rank of each node."""
    physical_host: str | None = None
    """Identifier shared by virtual machines of one physical host; None if unknown, or on bare metal. Reported
    only by the first rank of each node."""
    nvlink_domain: str | None = None
    """Cluster and clique of NVLink between hosts (e.g. GB200) from NVML; None without it."""
    resolves_own_hostname: bool | None = None
    hostname_address: str | None = None
    """Address that the host's own name resolves to."""
    hostname_seconds: float | None = None
    """Time to resolve the host's own name."""
    cpus: float | None = None
    """CPUs that the rank may use, by cgroup quota and affinity."""
    load_per_cpu: float | None = None
    """Runnable processes per CPU of the host, averaged over the minute before the checks."""
    memory_bytes: int | None = None
    """Memory that the rank's cgroup allows, or the machine's if that is less."""
    efa_devices: int | None = None
    ib_devices: tuple[str, ...] | None = None
    rdma_ports: tuple[RdmaPort, ...] | None = None
    """RDMA ports of the host; reported only by the first rank of each node."""
    gpu_processes: int | None = None
    """Number of other processes on this rank's GPU before the checks."""
    settings: dict[str, str] = field(default_factory=dict)
    """Host settings by name, reported only by the first rank of each node, without unreadable ones. In the
    result of a large run, "the same as rank" refers to an earlier rank with equal settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHealth:
    """Health of one GPU reported by NVML. Unsupported fields are None."""

    __pydantic_config__ = REPORTED
    rank: int
    uuid: str
    when: Literal["before", "loaded", "after"]
    """Before or after the load of the node phase, or throughout its matmuls. For "loaded", clock and power
    are medians, the temperature is the maximum, and throttling reasons applied for a tenth of the time or
    longer."""
    ecc_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    ecc_corrected: int | None = None
    """Corrected memory errors since the driver was loaded."""
    memory_mib: int | None = None
    """Total memory, MiB; less with ECC on GPUs that keep its bits there."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remap_exhausted_banks: int | None = None
    """Memory banks without a spare row for another remap."""
    throttle_reasons: tuple[str, ...] | None = None
    """NVML's throttling reasons without "idle"; () means none."""
    xids: tuple[int, ...] | None = None
    """XID events of this GPU during the run; None if unreadable, which differs from ()."""
    xids_earlier: tuple[int, ...] | None = None
    """XID events in the kernel's log from before the run; None if unreadable."""
    xid_source: Literal["kernel log", "NVML events"] | None = None
    """Source of xids. NVML reports only critical ones since the start of the checks."""
    recovery_action: str | None = None
    """Recovery action requested by the driver ("none", "GPU reset", "node reboot" ...); None if unknown."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    """Enforced power limit; power_default_w is the default one."""
    power_default_w: float | None = None
    slowdown_c: float | None = None
    """Temperature at which the hardware slows down."""
    sm_clock_mhz: int | None = None
    sm_clock_set_mhz: int | None = None
    """Application clock that was set; sm_clock_default_mhz is the default one."""
    sm_clock_default_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_most_mhz: int | None = None
    """Highest clock of the GPU's memory."""
    pcie_generation: int | None = None
    pcie_generation_gpu: int | None = None
    """Newest PCIe generation that the GPU supports in any slot."""
    pcie_generation_most: int | None = None
    """Newest PCIe generation that both GPU and slot support."""
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    pcie_replays: int | None = None
    """Packets replayed on its PCIe link since the driver was loaded."""
    nvlinks_active: int | None = None
    nvlink_mbytes_per_s: int | None = None
    """Rate of the slowest active NVLink, 10^6 bytes a second."""
    nvlink_errors: dict[str, int] | None = None
    """Errors of all active NVLinks since the driver was loaded, by kind ("replay", "recovery", "CRC" ...)."""
    fabric: str | None = None
    """Registration with the fabric manager: "completed", "in progress" ...; None without a fabric."""
    fabric_faults: tuple[str, ...] = ()
    fabric_clique: str | None = None
    """Cluster and clique of its registration, also within one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One ordered pair of nodes over a plain socket: connect, then move 256 KB."""

    __pydantic_config__ = REPORTED
    src: int
    """Node that connects and sends."""
    dst: int
    connected: bool
    bulk_ok: bool | None = None
    """Whether the bytes arrived in time; None without a connection."""
    seconds: float | None = None
    round_trip_s: float | None = None
    """Shortest of several round trips of an empty message over the connection."""
    tries: int = 1
    """Number of attempts until it connected and the bytes arrived."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPorts:
    """Sampled ports of a node, and the ones another node could not connect to."""

    __pydantic_config__ = STRICT
    src: int
    dst: int
    address: str
    """Address of ``dst`` on the interface in use."""
    other_family: bool = False
    """Whether the address is of the family (IPv4, IPv6) that the run does not use."""
    low: int
    high: int
    """Bounds of the ephemeral port range of ``dst``'s kernel."""
    tried: tuple[int, ...]
    """Tried ports, spread over that range."""
    blocked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """One figure measured by a single rank. ``what`` is a name of checks.LOCALS."""

    __pydantic_config__ = REPORTED
    rank: int
    what: str
    value: float | None
    """Median of the samples; None if measuring failed, see error."""
    unit: str
    samples: tuple[float, ...] = ()
    peer: int | None = None
    """The other rank, for copies between GPUs."""
    error: str | None = None
    note: str | None = None
    """Detail of the measurement that changes the meaning of the figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """Repeats of one matmul on one rank."""

    __pydantic_config__ = REPORTED
    rank: int
    whole: bool
    """Whether the operands are integers (exact in any order, so equal on all ranks) or random numbers."""
    times: int
    differing: int
    """Number of values that differed bitwise from the first repeat, summed over the repeats."""
    digest: str
    """Digest of the first result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosticFault:
    """A DCGM test that failed or warned."""

    __pydantic_config__ = STRICT
    test: str
    failed: bool
    gpu: str | None = None
    """UUID of the GPU; None if it concerns several GPUs or another part."""
    text: str = ""
    severities: tuple[int, ...] = ()
    """DCGM's severities of its errors (dcgm_errors.h, dcgmErrorSeverity_t); () if not reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """Result of DCGM's diagnostic on one node's GPUs."""

    __pydantic_config__ = REPORTED
    node: int
    level: int
    installed: bool = True
    version: str | None = None
    """Version of DCGM."""
    seconds: float = 0.0
    passed: tuple[str, ...] = ()
    """Tests that passed everywhere they ran."""
    left_out: tuple[str, ...] = ()
    """Tests that were skipped, or may not have run."""
    faults: tuple[DiagnosticFault, ...] = ()
    error: str | None = None
    """Reason for a missing result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over the world at one size, out of place. The time is the slowest rank's."""

    __pydantic_config__ = REPORTED
    op: str
    """A name of busbw.OPS."""
    dtype: str
    bytes: int
    """Size as defined by nccl-tests: one rank's buffer or all ranks' buffers (see busbw.OPS)."""
    ranks: int
    nodes: int
    seconds_median: float | None = None
    seconds_p95: float | None = None
    algbw_gbytes_per_s: float | None = None
    busbw_gbytes_per_s: float | None = None
    correct: bool | None = None
    """None if the values were not compared."""
    wrong_values: int | None = None
    wrong_ranks: tuple[int, ...] = ()
    """Ranks that received a wrong result."""
    algorithm: str | None = None
    """NCCL's algorithm from its log: RING, TREE, NVLS; None if not logged."""
    protocol: str | None = None
    """NCCL's protocol from its log: LL, LL128, SIMPLE; None if not logged."""
    iterations: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Bandwidth from one node to another, in one direction."""

    __pydantic_config__ = REPORTED
    src: int
    dst: int
    round: int
    """Measurements of the same round ran concurrently; the directions of a pair have separate rounds."""
    gbytes_per_s: float | None
    """Bandwidth of the fastest repetition; None if it failed, see error."""
    gbytes_per_s_p95: float | None = None
    """Bandwidth exceeded by 95 % of the repetitions; shows effects that the best hides, e.g. packet loss."""
    bytes: int | None = None
    segments: int | None = None
    """TCP segments sent, including retransmissions; None without a socket."""
    retransmitted: int | None = None
    """Retransmitted TCP segments."""
    rails: tuple[float, ...] = ()
    """NCCL only: bandwidth from each GPU to its counterpart, by local rank, GB/s of the best repetition."""
    alone: bool = False
    """Whether it was measured again with nothing else running on any node, or in a small group ("group") of
    which a sample was no faster alone."""
    repeat: Literal["shared", "control", "group"] | None = None
    """Repeated round: pairs that are slow only together ("shared"), healthy pairs for comparison ("control"),
    or a small group of suspects ("group")."""
    error: str | None = None

    @property
    def first(self) -> bool:
        """Whether it belongs to the first pass over the pairs."""
        return not self.alone and self.repeat is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Growth of a node's network counters during one phase."""

    __pydantic_config__ = STRICT
    node: int
    phase: PhaseName
    tcp_segments: int | None = None
    """TCP segments sent by all processes in the node's (or pod's) network namespace."""
    tcp_retransmitted: int | None = None
    rdma_errors: dict[str, int] | None = None
    """Error counters of EFA and InfiniBand ports that grew, "device/port/counter"; None without ports."""
    carrier_changes: int | None = None
    """Number of carrier changes (lost or regained) of the interface in use."""
    port_errors: dict[str, int] | None = None
    """Error counters of that interface that grew, by the kernel's or ethtool's names."""
    cpu_periods: int | None = None
    """Periods of the cgroup's CPU quota; None without a quota."""
    cpu_throttled: int | None = None
    """Periods in which the quota was used up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A rank that stopped progressing, as observed by the control channel (not the collective)."""

    __pydantic_config__ = STRICT
    rank: int
    node: int
    phase: PhaseName
    op: str
    sequence: int | None
    """Number of operations this rank had started in the phase; others were further."""
    waited_s: float
    kind: Literal["hang", "died", "lost", "taken"] = "hang"
    """"died": the process ended. "lost": its node stopped reporting. "taken": the same, and the cluster ended
    the whole step with it, so the node may not be at fault."""
    waiting: tuple[int, ...] = ()
    """Ranks waiting for it."""
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Outcome of one phase. A phase that was not requested is "skipped", with the reason."""

    __pydantic_config__ = STRICT
    name: PhaseName
    status: Literal["done", "failed", "skipped"]
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """Communication between ranks according to the backend's log. None: not logged."""

    __pydantic_config__ = STRICT
    backend: str
    nodes_seen: int | None = None
    ranks_seen: int | None = None
    network: Literal["socket", "ib", "efa", "shm", "other"] | None = None
    """Network between nodes. "efa": libfabric with the efa provider; "ib": InfiniBand or RoCE."""
    interface: str | None = None
    plugin: str | None = None
    gpu_direct: bool | None = None
    lines: tuple[str, ...] = ()
    """Lines of the log that contain this information."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsound:
    """A physically impossible figure, excluded from all results (checklist/analysis/soundness.py)."""

    __pydantic_config__ = STRICT
    check: str
    what: str
    value: str
    """Value as text, because JSON has no NaN."""
    unit: str
    why: str
    node: int | None = None
    """Node that reported it; None for a figure of all ranks."""
    rank: int | None = None
    dst: int | None = None
    """Other node of a figure between two nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All measurements of one run."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    started_unix: float
    seconds: float
    profile: str
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    nodes_asked: int
    gpus_per_node_asked: int
    """Requested GPUs per node; processes per node on CPUs."""
    local: bool = False
    """Whether the nodes are processes of one machine as requested, without a network between them."""
    facts: tuple[Facts, ...] = ()
    health: tuple[GpuHealth, ...] = ()
    probes: tuple[Probe, ...] = ()
    open_ports: tuple[OpenPorts, ...] = ()
    locals: tuple[Local, ...] = ()
    diagnosed: tuple[Diagnosed, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()
    counters: tuple[Counters, ...] = ()
    hangs: tuple[Hang, ...] = ()
    phases: tuple[Phase, ...] = ()
    transport: Transport | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of rank 0: NCCL_*, GLOO_*, FI_* and similar."""
    notes: tuple[str, ...] = ()
    """Remarks for readers on how the run measured."""
    unsound: tuple[Unsound, ...] = ()
    """Impossible values, which are removed from all other fields."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Hostname of each joined node from the control channel, also for nodes without facts."""
    callers: dict[int, str] = field(default_factory=dict)
    """Source address of each joined node."""

    def phase(self, name: PhaseName) -> Phase | None:
        """Return the outcome of a phase; None if it never started."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that reported facts."""
        return tuple(sorted({fact.node for fact in self.facts}))

    @property
    def nodes_by_rank(self) -> dict[int, int]:
        """Node of each rank that reported facts."""
        return {fact.rank: fact.node for fact in self.facts}

    @property
    def names(self) -> dict[int, str]:
        """Display name of each node that reported facts."""
        names: dict[int, str] = {}
        for fact in self.facts:
            names.setdefault(fact.node, fact.node_name or fact.hostname)
        return names


def to_json(measurements: Measurements) -> str:
    """Serialize to indented JSON text."""
    return json.dumps(to_dict(measurements), indent=1, allow_nan=False)


def to_dict(record: Any) -> dict[str, Any]:
    """Convert any record of this module to plain values."""
    return dataclasses.asdict(record)


def from_json(text: str) -> Measurements:
    """Parse JSON text. Raises UserError if it is invalid or of another version."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"The measurements are not JSON: {error}.", "Run the checks again.") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"The measurements have schema version {version!r}; this program reads {SCHEMA_VERSION}.",
            "Run the checks again, or read them with the program that wrote them.",
        )
    return record(Measurements, values)


@cache
def adapter_of(kind: type[R]) -> TypeAdapter[R]:
    """Return the cached pydantic validator of ``kind``, because building one takes up to 0.1 s."""
    from pydantic import TypeAdapter  # heavy to import

    return TypeAdapter(kind)


def record(kind: type[R], values: Any) -> R:
    """Convert plain values (from JSON) to a record of ``kind``. Raises UserError."""
    from pydantic import ValidationError  # heavy to import

    adapter: TypeAdapter[R] = adapter_of(kind)  # type: ignore[arg-type]  # functools.cache drops the R
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{kind.__name__}.{where} is {first.get('input')!r}: {first['msg']}.", "Run the checks again."
        ) from None
