"""What the ranks' facts say: is the job what was asked for, is the software one, is the hardware sane?"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from checklist.judges.advice import finding
from checklist.judges.context import Answer, Case, answer, no_verdict, skipped
from checklist.measurements import Facts
from checklist.result import Finding

GIB = 2**30
LEAST_SHM = GIB  # NCCL uses tens of MB for each rank, data loaders far more; 64 MB is Docker's default
LEAST_MEMLOCK = GIB
UNLIMITED = -1
SKEW_WARN_S = 1.0  # logs of different nodes can't be put in order any more
SKEW_FAIL_S = 900.0  # S3 refuses requests that are 15 minutes off
ONE_EVERYWHERE = ("torch", "cuda", "nccl", "driver")  # a mix of these can hang; of others it only puzzles
TORCH_HANGS = ((2, 6, 0), (2, 7, 1))  # after the first, before the second: pytorch#153960


def ranks(case: Case) -> Answer:
    asked = case.measurements
    world = asked.nodes_asked * asked.gpus_per_node_asked
    if not case.facts:
        return case.unmeasured("ranks", "facts")
    found = [*_missing(case, world), *_shared_hosts(case), *_shared_gpus(case)]
    good = f"{len(case.facts)} ranks on {len(asked.nodes)} nodes, as asked for."
    return answer("ranks", good, found, nodes=case.all_names)


def _missing(case: Case, world: int) -> list[Finding]:
    asked, seen = case.measurements.nodes_asked, len(case.measurements.nodes)
    if len(case.facts) >= world and seen >= asked:
        return []
    if seen == 1 < asked:
        title = f"{asked} nodes asked for, 1 seen ({case.all_names[0]}): the launcher started separate jobs."
        return [finding("ranks", "ranks-separate", "FAIL", title)]
    title = f"{world} ranks on {asked} nodes asked for, {len(case.facts)} on {seen} seen."
    return [finding("ranks", "ranks-missing", "FAIL", title)]


def _shared_hosts(case: Case) -> list[Finding]:
    if case.local:
        return []
    by_boot: dict[str, set[int]] = defaultdict(set)
    for fact in case.leaders:
        if fact.boot_id is not None:
            by_boot[fact.boot_id].add(fact.node)
    return [
        finding(
            "ranks",
            "nodes-share-host",
            "FAIL",
            f"{', '.join(case.names(nodes))} are {len(nodes)} nodes on one host.",
        )
        for nodes in by_boot.values()
        if len(nodes) > 1
    ]


def _shared_gpus(case: Case) -> list[Finding]:
    users: dict[str, list[int]] = defaultdict(list)
    for fact in case.facts if case.cuda else ():
        if fact.local_rank < len(fact.gpu_uuids):
            users[fact.gpu_uuids[fact.local_rank]].append(fact.rank)
    return [
        finding(
            "ranks",
            "gpu-shared",
            "FAIL",
            f"Ranks {', '.join(map(str, sharing))} use one GPU, {uuid}.",
            ranks=sharing,
        )
        for uuid, sharing in users.items()
        if len(sharing) > 1
    ]


def versions(case: Case) -> Answer:
    if not case.facts:
        return case.unmeasured("versions", "facts")
    found = []
    for name in sorted({key for fact in case.facts for key in fact.versions}):
        holders: dict[str, set[int]] = defaultdict(set)
        for fact in case.facts:
            value = fact.versions.get(name)
            if value is not None:
                holders[value].add(fact.node)
        if len(holders) > 1:
            told = "; ".join(f"{value} on {', '.join(case.names(nodes))}" for value, nodes in holders.items())
            serious = name in ONE_EVERYWHERE
            found.append(
                finding(
                    "versions", "versions-differ", "FAIL" if serious else "WARN", f"{name} differs: {told}."
                )
            )
    torch = str(case.facts[0].versions.get("torch") or "")
    if case.cuda and TORCH_HANGS[0] < _numbers(torch) < TORCH_HANGS[1]:
        title = f"torch {torch} can hang with NCCL."
        found.append(finding("versions", "torch-hang", "WARN", title, version=torch))
    if not any(fact.versions for fact in case.facts):
        return case.unmeasured("versions", "facts")
    return answer("versions", "The same software on all ranks.", found, nodes=case.all_names)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def shared_memory(case: Case) -> Answer:
    sizes = [(fact, fact.shm_bytes) for fact in case.leaders if fact.shm_bytes is not None]
    if not sizes:
        return case.unmeasured("shared-memory", "facts")
    found = [
        finding(
            "shared-memory",
            "shm-small",
            "FAIL" if case.cuda else "WARN",
            f"{case.name(fact.node)} has {size / 2**20:.0f} MiB of shared memory, not {LEAST_SHM // 2**20}.",
            suspects=[case.name(fact.node)],
        )
        for fact, size in sizes
        if size < LEAST_SHM
    ]
    least = min(size for _, size in sizes)
    return answer(
        "shared-memory", f"At least {least / GIB:.1f} GiB on each node.", found, nodes=case.all_names
    )


def memlock(case: Case) -> Answer:
    if not any(fact.efa_devices or fact.ib_devices for fact in case.facts):
        return skipped("memlock", "There are no RDMA devices.")
    limits = [(fact, fact.memlock_bytes) for fact in case.leaders if fact.memlock_bytes is not None]
    if not limits:
        return case.unmeasured("memlock", "facts")
    found = [
        finding(
            "memlock",
            "memlock-low",
            "FAIL" if limit < LEAST_MEMLOCK else "WARN",
            f"{case.name(fact.node)} may lock only {limit / 2**20:.0f} MiB of memory.",
            suspects=[case.name(fact.node)],
        )
        for fact, limit in limits
        if limit != UNLIMITED
    ]
    return answer("memlock", "Unlimited on each node.", found, nodes=case.all_names)


def interface(case: Case) -> Answer:
    known = [fact for fact in case.leaders if fact.nic is not None]
    if not known:
        return case.unmeasured("interface", "facts")
    if case.local or len(case.leaders) == 1:
        return answer("interface", f"{known[0].nic}; all ranks are on one machine.", nodes=case.all_names)
    found = []
    for fact in known:
        fault = _nic_fault(fact)
        if fault is not None:
            others = [
                nic.name for nic in fact.nics if nic.up is not False and not _nic_fault_of(nic.addresses)
            ]
            title = f"{case.name(fact.node)} would use {fact.nic}, {fault}" + (
                f" ({fact.nic_reason})." if fact.nic_reason else "."
            )
            found.append(
                finding(
                    "interface",
                    "nic-wrong",
                    "FAIL",
                    title,
                    suspects=[case.name(fact.node)],
                    nic=fact.nic,
                    candidates=", ".join(others) or "none that reaches others",
                    best=others[0] if others else "<interface>",
                )
            )
    found = found or _unlike_nics(case, known)
    if len(known) < len(case.leaders) and not found:
        return no_verdict("interface", "It is not known which interface every node uses.")
    told = ", ".join(sorted({str(fact.nic) for fact in known}))
    return answer("interface", f"{told} on all nodes.", found, nodes=case.all_names)


def _unlike_nics(case: Case, known: list[Facts]) -> list[Finding]:
    """Interfaces that are not alike on all hosts: a link that has trained to a lower rate, another MTU."""
    found = []
    for field, what, code in (("gbps", "Gbit/s", "nic-rate"), ("mtu", "bytes of MTU", "mtu-differs")):
        holders: dict[float, list[int]] = defaultdict(list)
        for fact in known:
            value = next((getattr(nic, field) for nic in fact.nics if nic.name == fact.nic), None)
            if value is not None:
                holders[value].append(fact.node)
        if len(holders) > 1:
            usual = max(holders, key=lambda value: (len(holders[value]), value))
            odd = case.names(node for value, nodes in holders.items() if value != usual for node in nodes)
            told = "; ".join(
                f"{value:g} {what} on {', '.join(case.names(nodes))}" for value, nodes in holders.items()
            )
            title = f"The interfaces differ: {told}."
            found.append(finding("interface", code, "WARN", title, suspects=odd))
    return found


def _nic_fault(fact: Facts) -> str | None:
    nic = next((nic for nic in fact.nics if nic.name == fact.nic), None)
    if nic is None:
        return "which does not exist" if fact.nics else None
    if nic.up is False:
        return "which is down"
    return _nic_fault_of(nic.addresses)


def _nic_fault_of(addresses: tuple[str, ...]) -> str | None:
    usable = [address for address in addresses if not address.startswith(("127.", "169.254.", "::1", "fe80"))]
    return None if usable else "which has no address that others can reach"


def rdma(case: Case) -> Answer:
    if not case.cuda:
        return skipped("rdma", "The run uses no GPUs.")
    efa = {fact.node: fact.efa_devices for fact in case.leaders if fact.efa_devices is not None}
    ib = {fact.node: len(fact.ib_devices) for fact in case.leaders if fact.ib_devices is not None}
    has_efa = case.machine_fabric.upper().startswith("EFA")
    if not has_efa and not any(efa.values()) and not any(ib.values()):
        if not efa and not ib:
            return case.unmeasured("rdma", "facts")
        return skipped(
            "rdma", "Neither the machine type nor the hosts have RDMA devices, as far as is known."
        )
    counts = efa if has_efa or any(efa.values()) else ib
    kind = "EFA" if counts is efa else "InfiniBand"
    most = max(counts.values(), default=0)
    found = [
        finding(
            "rdma",
            "rdma-missing",
            "FAIL",
            f"{case.name(node)} sees {count} {kind} devices" + (f", others {most}." if most else "."),
            suspects=[case.name(node)],
        )
        for node, count in counts.items()
        if count < max(most, 1)
    ]
    if not counts:
        return case.unmeasured("rdma", "facts")
    return answer("rdma", f"{most} {kind} devices on each node.", found, nodes=case.all_names)


def hostname(case: Case) -> Answer:
    known = [fact for fact in case.leaders if fact.resolves_own_hostname is not None]
    if not known:
        return case.unmeasured("hostname", "facts")
    found = []
    for fact in known:
        name = case.name(fact.node)
        address = fact.hostname_address or ""
        if not fact.resolves_own_hostname:
            title = f"{name} can't resolve its own name, {fact.hostname}."
            verdict = "WARN" if case.local else "FAIL"
            found.append(finding("hostname", "hostname-unresolved", verdict, title, suspects=[name]))  # type: ignore[arg-type]
        elif address.startswith(("127.", "::1")) and not case.local and len(case.leaders) > 1:
            title = f"{name}: its own name resolves to {address}."
            found.append(
                finding(
                    "hostname",
                    "hostname-loopback",
                    "WARN",
                    title,
                    suspects=[name],
                    address=address,
                    nic=fact.nic,
                )
            )
    return answer("hostname", "Each host resolves its own name.", found, nodes=case.all_names)


def clock(case: Case) -> Answer:
    if case.local or len(case.leaders) < 2:
        return skipped("clock", "All ranks are on one machine.")
    offsets = [(fact, fact.clock_offset_s) for fact in case.leaders if fact.clock_offset_s is not None]
    if len(offsets) < len(case.leaders):
        return case.unmeasured("clock", "facts")
    found = []
    for fact, offset in offsets:
        sure = abs(offset) - (fact.clock_offset_error_s or 0.0)
        if sure > SKEW_WARN_S:
            title = f"The clock of {case.name(fact.node)} is {offset:+.1f} s off rank 0's."
            verdict = "FAIL" if sure > SKEW_FAIL_S else "WARN"
            found.append(finding("clock", "clock-skew", verdict, title, suspects=[case.name(fact.node)]))  # type: ignore[arg-type]
    most = max(abs(offset) for _, offset in offsets)
    return answer("clock", f"Within {most:.3f} s.", found, nodes=case.all_names)


def placement(case: Case) -> Answer:
    if case.local or len(case.leaders) < 2:
        return skipped("placement", "All ranks are on one machine.")
    zones = {fact.node: fact.zone for fact in case.leaders}
    if None in zones.values():
        return no_verdict(
            "placement",
            "The zone of some nodes is not known: the metadata service does not answer. Set NODE_ZONE, or "
            "NODE_NAME by the downward API and let the pods get nodes.",
        )
    different = Counter(str(zone) for zone in zones.values())
    found = []
    if len(different) > 1:
        told = ", ".join(f"{count} in {zone}" for zone, count in different.most_common())
        found.append(
            finding("placement", "zones-differ", "WARN", f"The nodes are in different zones: {told}.")
        )
    groups = Counter(fact.placement_group or "none" for fact in case.leaders)
    if len(groups) > 1:
        told = ", ".join(f"{count} in {group}" for group, count in groups.most_common())
        title = f"The nodes are in different placement groups: {told}."
        found.append(finding("placement", "groups-differ", "WARN", title))
    told = f"All nodes are in {next(iter(different))}"
    layers = [fact.network_nodes for fact in case.leaders]
    if all(layers):
        shared = sum(len(set(layer)) == 1 for layer in zip(*layers, strict=False))
        told += f" and share {shared} of {min(map(len, layers))} layers of the network"
    return answer("placement", f"{told}.", found, nodes=case.all_names)
