"""What the probes measure, raw: no opinion in it. Frozen, and through JSON both ways without loss.

``None`` is "not measured" or "can't be known here", never zero. Nodes and ranks count from 0; a node is a
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

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA_VERSION = 2
PhaseName = Literal["facts", "mesh", "diag", "node", "world", "pairs"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)  # in the order in which they run
NO_FOLDER = "there is no folder"  # how the error of a Local begins whose place is missing
NO_TOOL = "there is no"  # the same, where the program that measures is missing
SAME_AS_RANK = "the same as rank"  # among a host's settings: instead of them all, in a large run's result
IDLE = "nothing"  # the operation of a Hang that was lost between two of them
BROKEN_OFF = "it had not ended when the run was broken off"  # of a Phase, where nobody knows more
R = TypeVar("R")
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}
REPORTED = {
    **STRICT,
    "allow_inf_nan": True,
}  # by a rank: analysis/soundness.py takes out what can't be


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """One network interface of a host."""

    __pydantic_config__ = REPORTED
    name: str
    addresses: tuple[str, ...] = ()
    mtu: int | None = None
    gbps: float | None = None
    """Line rate in 10^9 bits a second, where the kernel knows it."""
    up: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaPort:
    """One port of an InfiniBand, RoCE or EFA device, in the kernel's words."""

    __pydantic_config__ = REPORTED
    name: str
    """Device and number of the port: "mlx5_0/1"."""
    model: str | None = None
    """The board, or what the driver calls the chip."""
    state: str | None = None
    """"ACTIVE" where packets pass; "DOWN", "INIT", "ARMED"."""
    physical: str | None = None
    """"LinkUp"; "Polling" or "Disabled", where there is no link."""
    gbps: float | None = None
    """Rate in 10^9 bits a second that the link has trained to."""
    layer: str | None = None
    """"InfiniBand" or "Ethernet"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What one rank says of its host, its devices and its software."""

    __pydantic_config__ = REPORTED
    rank: int
    node: int
    """The node that the launcher says this rank runs on; whether that is true is judged by boot_id."""
    local_rank: int
    hostname: str
    boot_id: str | None = None
    """The kernel's boot id: equal for ranks of one host, whatever the containers call themselves."""
    node_name: str | None = None
    """The cluster's name of the host (NODE_NAME of the pod, or the instance id); the hostname if unknown."""
    addresses: tuple[str, ...] = ()
    nic: str | None = None
    """The interface that NCCL or gloo will take."""
    nic_reason: str | None = None
    """Why that one: the variable that names it, or the route that it has."""
    nics: tuple[Nic, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    """All GPUs that this rank can see; its own is at its local rank."""
    gpu_names: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    """torch, cuda, nccl, driver, python, kernel, image, efa-installer: None where it can't be known."""
    shm_bytes: int | None = None
    memlock_bytes: int | None = None
    """RLIMIT_MEMLOCK, soft; -1: unlimited."""
    clock_unix: float | None = None
    clock_offset_s: float | None = None
    """This host's clock minus rank 0's, from a round trip."""
    clock_offset_error_s: float | None = None
    """Half the shortest round trip: how wrong clock_offset_s can be."""
    zone: str | None = None
    instance_type: str | None = None
    placement_group: str | None = None
    network_nodes: tuple[str, ...] = ()
    """The network's own units that the host is in, the largest first, as node labels tell them."""
    nvlink_domain: str | None = None
    """Cluster and clique of NVLink between hosts (GB200 and the like), as NVML tells them; None: none."""
    resolves_own_hostname: bool | None = None
    hostname_address: str | None = None
    """What its own hostname resolves to."""
    efa_devices: int | None = None
    ib_devices: tuple[str, ...] | None = None
    rdma_ports: tuple[RdmaPort, ...] | None = None
    """Of its host; told by the first rank of each node alone."""
    gpu_processes: int | None = None
    """Processes of others that were on this rank's GPU before the checks."""
    settings: dict[str, str] = field(default_factory=dict)
    """Of the host, by name, from its first rank alone; what can't be read is not there. In the result of a
    large run "the same as rank" names whose they are, where an earlier rank has told the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHealth:
    """One GPU's own account of its health, through NVML. Fields it doesn't offer are None."""

    __pydantic_config__ = REPORTED
    rank: int
    uuid: str
    when: Literal["before", "loaded", "after"]
    """Before or after the load of the node phase, or all through its matrix products. Then clock and power
    are medians, the temperature is the highest, and a reason of throttling was there for a tenth of the time
    or longer."""
    ecc_uncorrected: int | None = None
    """Uncorrectable memory errors since the driver was loaded."""
    ecc_corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """NVML's reasons why clocks are held down, without "idle"; () is: none."""
    xids: tuple[int, ...] | None = None
    """XID events of this GPU in the run; None where they can't be read, which is not the same as ()."""
    xids_earlier: tuple[int, ...] | None = None
    """Those that the kernel's log still has from before the run; None where it can't be read."""
    xid_source: Literal["kernel log", "NVML events"] | None = None
    """Where xids are from. NVML tells critical ones only, from when the checks began."""
    recovery_action: str | None = None
    """What the driver itself asks for ("none", "GPU reset", "node reboot" ...); None: it doesn't say."""
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    """What is enforced, and what it is by default."""
    power_default_w: float | None = None
    slowdown_c: float | None = None
    """Where the hardware slows down."""
    sm_clock_mhz: int | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    """The newest that GPU and slot both have."""
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    pcie_replays: int | None = None
    """Packets that its link has sent again since the driver was loaded."""
    nvlinks_active: int | None = None
    nvlink_mbytes_per_s: int | None = None
    """Of the slowest active one, 10^6 bytes a second."""
    nvlink_errors: dict[str, int] | None = None
    """Of all active ones since the driver was loaded, by kind ("replay", "recovery", "CRC" ...)."""
    fabric: str | None = None
    """What the fabric manager has done with it: "completed", "in progress" ...; None: it is in no fabric."""
    fabric_faults: tuple[str, ...] = ()
    fabric_clique: str | None = None
    """Cluster and clique that it is registered in, also within one host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One ordered pair of nodes over a plain socket: connect, then move 256 KB."""

    __pydantic_config__ = REPORTED
    src: int
    """Node that connects and sends."""
    dst: int
    connected: bool
    bulk_ok: bool | None = None
    """Whether the bytes arrived in time; None where nothing connected."""
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPorts:
    """Some of a node's ports, and which of them another node could not connect to."""

    __pydantic_config__ = STRICT
    src: int
    dst: int
    address: str
    """Of ``dst``, on the interface in use."""
    other_family: bool = False
    """Whether that is its address of the family (IPv4, IPv6) that the run does not go over."""
    low: int
    high: int
    """From and to where the kernel of ``dst`` gives ports out."""
    tried: tuple[int, ...]
    """Spread over that range."""
    blocked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """One figure of one rank alone. ``what`` is a name of checks.LOCALS."""

    __pydantic_config__ = REPORTED
    rank: int
    what: str
    value: float | None
    """Median of the samples; None: it was tried and could not be measured, see error."""
    unit: str
    samples: tuple[float, ...] = ()
    peer: int | None = None
    """The other rank, for copies between GPUs."""
    error: str | None = None
    note: str | None = None
    """How it was measured, where that changes what the figure means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """The same matrix product several times on one rank."""

    __pydantic_config__ = REPORTED
    rank: int
    whole: bool
    """Of whole numbers: exact in any order, so that it is the same on all ranks. Else of random ones."""
    times: int
    differing: int
    """Values that had other bits than the first time, all times together."""
    digest: str
    """Of the bits of the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosticFault:
    """A test of DCGM's that has failed, or that warns."""

    __pydantic_config__ = STRICT
    test: str
    failed: bool
    gpu: str | None = None
    """By UUID; None: it is of several GPUs, or of another part."""
    text: str = ""
    severities: tuple[int, ...] = ()
    """DCGM's own, of all its errors (dcgm_errors.h, dcgmErrorSeverity_t); (): not told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """What DCGM's diagnostic says of one node's GPUs."""

    __pydantic_config__ = REPORTED
    node: int
    level: int
    installed: bool = True
    version: str | None = None
    """Of DCGM."""
    seconds: float = 0.0
    passed: tuple[str, ...] = ()
    """Tests that have passed wherever they were run."""
    left_out: tuple[str, ...] = ()
    """Tests that were skipped, or of which it isn't clear whether they were run."""
    faults: tuple[DiagnosticFault, ...] = ()
    error: str | None = None
    """Why there is no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over the world at one size, out of place. The time is the slowest rank's."""

    __pydantic_config__ = REPORTED
    op: str
    """A name of formulas.OPS."""
    dtype: str
    bytes: int
    """As nccl-tests counts: a rank's buffer, or all ranks' buffers together (formulas.OPS says which)."""
    ranks: int
    nodes: int
    seconds_median: float | None = None
    seconds_p95: float | None = None
    algbw_gbytes_per_s: float | None = None
    busbw_gbytes_per_s: float | None = None
    correct: bool | None = None
    """None: the values were not compared."""
    wrong_values: int | None = None
    wrong_ranks: tuple[int, ...] = ()
    """Ranks that saw a wrong result."""
    algorithm: str | None = None
    """NCCL's algorithm where its log tells it: RING, TREE, NVLS."""
    protocol: str | None = None
    """NCCL's protocol where its log tells it: LL, LL128, SIMPLE."""
    iterations: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Bandwidth from one node to another, in this direction alone."""

    __pydantic_config__ = REPORTED
    src: int
    dst: int
    round: int
    """Measurements of one number ran at the same time; the two directions of a pair have two numbers."""
    gbytes_per_s: float | None
    """Of the best repetition; None: it failed, see error."""
    gbytes_per_s_p95: float | None = None
    """Of the repetition that 95 % of them were faster than: what the best hides, such as lost packets."""
    bytes: int | None = None
    segments: int | None = None
    """TCP segments that the sender has sent for it, retransmitted ones too; None without a socket."""
    retransmitted: int | None = None
    """Those of them that were sent again."""
    rails: tuple[float, ...] = ()
    """Over NCCL what each GPU sent to its counterpart, by local rank, GB/s of the best repetition."""
    alone: bool = False
    """A second measurement of this pair, with nothing else running on any node."""
    repeat: Literal["shared", "control"] | None = None
    """Once more in a round: of pairs that were slow together and well alone, or of good ones, to compare."""
    error: str | None = None

    @property
    def first(self) -> bool:
        """Whether it is of the rounds that measure every pair."""
        return not self.alone and self.repeat is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """By how much a node's own counters of its network have grown in one phase."""

    __pydantic_config__ = STRICT
    node: int
    phase: PhaseName
    tcp_segments: int | None = None
    """TCP segments sent by anybody in the node's (or pod's) network namespace."""
    tcp_retransmitted: int | None = None
    rdma_errors: dict[str, int] | None = None
    """Error counters of EFA and InfiniBand ports that have grown, "device/port/counter"; None: no ports."""
    carrier_changes: int | None = None
    """How often the interface in use lost its carrier or got it back."""
    port_errors: dict[str, int] | None = None
    """Error counters of that interface that have grown, by the kernel's or ethtool's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A rank that did not come along, as the control channel (not the collective) has seen it."""

    __pydantic_config__ = STRICT
    rank: int
    node: int
    phase: PhaseName
    op: str
    sequence: int | None
    """How many operations this rank had begun in the phase; others were further."""
    waited_s: float
    kind: Literal["hang", "died", "lost", "taken"] = "hang"
    """"died": the process ended. "lost": no more is heard of its node. "taken": the same, and the cluster
    ended the whole step with it, so that it may be no fault of the node's."""
    waiting: tuple[int, ...] = ()
    """Ranks that waited for it."""
    detail: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """How one phase went. One that was not asked for is "skipped", with the reason."""

    __pydantic_config__ = STRICT
    name: PhaseName
    status: Literal["done", "failed", "skipped"]
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """What the backend's log says of how the ranks talk. None: it doesn't say."""

    __pydantic_config__ = STRICT
    backend: str
    nodes_seen: int | None = None
    ranks_seen: int | None = None
    network: Literal["socket", "ib", "efa", "shm", "other"] | None = None
    """Between nodes. "efa": libfabric with the efa provider; "ib" is InfiniBand or RoCE."""
    interface: str | None = None
    plugin: str | None = None
    gpu_direct: bool | None = None
    lines: tuple[str, ...] = ()
    """The lines of the log that this was read from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsound:
    """A figure that can't be, and so counts nowhere (checklist/analysis/soundness.py)."""

    __pydantic_config__ = STRICT
    check: str
    what: str
    value: str
    """As text: JSON has no NaN."""
    unit: str
    why: str
    node: int | None = None
    """Who told it; None: it is all ranks' together."""
    rank: int | None = None
    dst: int | None = None
    """The other node, of a figure between two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All that one run has measured."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    started_unix: float
    seconds: float
    profile: str
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    nodes_asked: int
    gpus_per_node_asked: int
    """Processes for each node on CPUs."""
    local: bool = False
    """The nodes are processes of one machine, as asked for: nothing between them is a network."""
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
    """NCCL_*, GLOO_*, FI_* and the like, as rank 0 has them."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how it was measured."""
    unsound: tuple[Unsound, ...] = ()
    """What was told and can't be; none of it is among the others."""
    hosts: dict[int, str] = field(default_factory=dict)
    """What each node that has joined calls its host, by the control channel: also where it told no facts."""
    callers: dict[int, str] = field(default_factory=dict)
    """From which address each of them has joined."""

    def phase(self, name: PhaseName) -> Phase | None:
        """How that phase went; None where it never began."""
        return next((phase for phase in self.phases if phase.name == name), None)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that have answered."""
        return tuple(sorted({fact.node for fact in self.facts}))

    @property
    def nodes_by_rank(self) -> dict[int, int]:
        """The node of each rank that has said anything."""
        return {fact.rank: fact.node for fact in self.facts}

    @property
    def names(self) -> dict[int, str]:
        """What people call each node that has answered."""
        names: dict[int, str] = {}
        for fact in self.facts:
            names.setdefault(fact.node, fact.node_name or fact.hostname)
        return names

    def name_of(self, node: int) -> str:
        """What people call that node. All at once: ``names``."""
        return self.names.get(node) or self.hosts.get(node) or f"node {node}"


def to_json(measurements: Measurements) -> str:
    """As JSON text, indented."""
    return json.dumps(to_dict(measurements), indent=1, allow_nan=False)


def to_dict(record: Any) -> dict[str, Any]:
    """Any record of this module as plain values."""
    return dataclasses.asdict(record)


def from_json(text: str) -> Measurements:
    """From JSON text. Raises UserError where it is none, or is of another version."""
    try:
        values = json.loads(text)
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
    """The pydantic validator of ``kind``, built once for each kind: building one takes up to 0.1 s."""
    from pydantic import TypeAdapter  # heavy to import

    return TypeAdapter(kind)


def record(kind: type[R], values: Any) -> R:
    """``values`` (plain, as JSON gives them) as a record of ``kind``. Raises UserError."""
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
