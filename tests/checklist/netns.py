"""Separate hosts on one machine: network namespaces on a bridge, each with its own name and rate limit.

Every host has a rate limit (tbf), because memory bandwidth would hide a slow host. Names are random, and
:meth:`Bed.close` removes everything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checklist.result import Result, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
RATE = "200mbit"
_TOOLS = ("ip", "tc", "iptables", "unshare")
_BURST = ("burst", "64kb", "latency", "100ms")
_NETNS = Path("/etc/netns")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {  # of a CPU quota and a memory limit, in version 2 and in version 1 of cgroups
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
    "memory": ("memory.max", "memory.limit_in_bytes"),
}
_CPU_PERIOD_US = 100_000
_SYN_BYTES = 60  # over IPv4, with the options that Linux sends
_NEIGHBORS = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")  # the most entries of the ARP table


def missing() -> str | None:
    """Return the reason why separate hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} (apt install iproute2 iptables)"
    probe = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "this machine does not allow network namespaces"


def cgroups_writable() -> bool:
    """Return whether :meth:`Bed.confine` works here."""
    return os.access(_CGROUPS if _unified() else _CGROUPS / "cpu", os.W_OK)


def _unified() -> bool:
    """Return whether the machine has version 2 of cgroups."""
    return (_CGROUPS / "cgroup.controllers").exists()


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass
class Job:
    """The checklist running on every host."""

    processes: list[subprocess.Popen[str]]
    json: Path
    begin: float
    keep: Path
    seconds: float = 0.0

    def wait(self, limit_s: float) -> list[int]:
        """Return the exit statuses, -9 for processes killed at the limit; set ``seconds``, host 0's time."""
        codes = []
        for host, process in enumerate(self.processes):
            try:
                process.wait(timeout=max(0.1, limit_s - (time.monotonic() - self.begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            codes.append(process.returncode)
            if host == 0:
                self.seconds = time.monotonic() - self.begin
        return codes

    @property
    def result(self) -> Result:
        """Result that host 0 has written."""
        return read(self.json)

    def output(self, host: int = 0) -> str:
        """Return the output of a host's process."""
        return (self.keep / f"host{host}.txt").read_text()


class BridgedHosts:
    """Hosts on a bridge. Host i has the name ``h<i>`` and the address 10.77.0.(10 + i).

    ``ipv6``: the address is fd77::(10 + i) instead. ``dual``: both; names resolve to the IPv4 address.
    """

    def __init__(self, hosts: int, rate: str = RATE, *, ipv6: bool = False, dual: bool = False) -> None:
        self.hosts, self._ipv6, self._dual = hosts, ipv6, dual
        self.called = [f"h{host}" for host in range(hosts)]
        """Host name of each host."""
        self._id = secrets.token_hex(3)
        self._bridge, self._second_bridge = f"ckb{self._id}", f"ckc{self._id}"
        self._jobs: list[Job] = []
        self._flapping: list[subprocess.Popen[bytes]] = []
        self._cgroups: dict[int, list[Path]] = {}
        self._neighbors = _NEIGHBORS.read_text()
        try:
            if hosts * hosts > int(self._neighbors):  # all hosts share one kernel's table of neighbors
                _NEIGHBORS.write_text(str(2 * hosts * hosts))
            do("ip", "link", "add", self._bridge, "type", "bridge")
            do("ip", "link", "set", self._bridge, "up")
            for host in range(hosts):
                self._add(host, rate)
        except BaseException:
            self.close()
            raise

    def _add(self, host: int, rate: str) -> None:
        name, bridge_port = self.name(host), self.bridge_port(host)
        loopback = "::1" if self._ipv6 else "127.0.0.1"
        host_names = "".join(f"{self.address(other)} h{other}\n" for other in range(self.hosts))
        self.names(host, f"{loopback} localhost\n{host_names}")
        do("ip", "netns", "add", name)
        do("ip", "link", "add", bridge_port, "type", "veth", "peer", "name", "eth0", "netns", name)
        do("ip", "link", "set", bridge_port, "master", self._bridge, "up")
        do("ip", "-n", name, "link", "set", "lo", "up")
        if self._ipv6 or self._dual:  # nodad: no second's wait for who else has it
            do("ip", "-n", name, "addr", "add", f"{self.ipv6_address(host)}/64", "dev", "eth0", "nodad")
        if not self._ipv6:
            do("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        do("ip", "-n", name, "link", "set", "eth0", "up")
        self.slow(host, rate)

    def name(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"ck{self._id}h{host}"

    def address(self, host: int) -> str:
        return self.ipv6_address(host) if self._ipv6 else f"10.77.0.{10 + host}"

    def ipv6_address(self, host: int) -> str:
        return f"fd77::{10 + host:x}"

    def bridge_port(self, host: int) -> str:
        """Return the name of a host's end on the bridge."""
        return f"ckv{self._id}{host}"

    def names(self, host: int, hosts_file: str) -> None:
        """Set /etc/hosts of a host; there is no name server."""
        folder = _NETNS / self.name(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts_file)
        (folder / "resolv.conf").write_text("")  # no name server: an unknown name is unknown at once
        (folder / "nsswitch.conf").write_text("hosts: files\n")

    def slow_names(self, host: int, seconds: int) -> None:
        """Let a host resolve names at a name server that does not answer, and then by /etc/hosts."""
        folder = _NETNS / self.name(host)
        server = f"nameserver {self.address(200)}\noptions timeout:{seconds} attempts:1\n"
        (folder / "resolv.conf").write_text(server)
        (folder / "nsswitch.conf").write_text("hosts: dns files\n")

    # -- faults ----------------------------------------------------------------------------------------

    def slow(self, host: int, rate: str, *, sends: bool = True, receives: bool = True) -> None:
        """Limit the rate at which a host sends, receives, or both."""
        if sends:
            self.on(host, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, *_BURST)
        if receives:
            do("tc", "qdisc", "replace", "dev", self.bridge_port(host), "root", "tbf", "rate", rate, *_BURST)

    def slow_link(self, a: int, b: int, rate: str, peers: str = RATE) -> None:
        """Limit the rate between two hosts only."""
        for src, dst in ((a, b), (b, a)):
            device = ("dev", "eth0")
            self.on(src, "tc", "qdisc", "del", *device, "root")
            self.on(src, "tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10")
            for number, speed in (("1:10", peers), ("1:20", rate)):
                command = ("tc", "class", "add", *device, "parent", "1:", "classid", number, "htb", "rate")
                self.on(src, *command, speed, "burst", "64kb")
            peer = f"{self.address(dst)}/32"
            selector = ("protocol", "ip", "parent", "1:", "u32", "match", "ip", "dst", peer, "flowid", "1:20")
            self.on(src, "tc", "filter", "add", *device, *selector)

    def cut(self, a: int, b: int) -> None:
        """Drop all packets between two hosts."""
        for src, dst in ((a, b), (b, a)):
            self.on(src, "iptables", "-A", "OUTPUT", "-d", self.address(dst), "-j", "DROP")

    def block_inbound(self, host: int) -> None:
        """Drop incoming connections of a host, like a firewall that allows outgoing ones only."""
        self.on(host, "iptables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-j", "DROP")

    def block_ports(self, host: int, ports: str) -> None:
        """Drop connections to ports of a host, e.g. "46000:60999"."""
        asks = ("-i", "eth0", "-p", "tcp", "--syn", "--dport", ports)
        self.on(host, "iptables", "-A", "INPUT", *asks, "-j", "DROP")

    def block_ipv6(self, host: int) -> None:
        """Drop TCP over IPv6 to a host."""
        self.on(host, "ip6tables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "-j", "DROP")

    def drop_first_packets(self, src: int, dst: int, packets: int = 2) -> None:
        """Drop the first packets of connections from one host to another."""
        asks = ("-p", "tcp", "--syn", "-d", self.address(dst))
        limit_options = ("-m", "quota", "--quota", str(packets * _SYN_BYTES))
        self.on(src, "iptables", "-A", "OUTPUT", *asks, *limit_options, "-j", "DROP")

    def lose(self, into: int, share: float, *, sender: int | None = None) -> None:
        """Drop a share of the packets to a host, from all senders or from one."""
        chosen = ("-s", self.address(sender)) if sender is not None else ("-i", "eth0")
        random = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        self.on(into, "iptables", "-A", "INPUT", "-p", "tcp", *chosen, *random, "-j", "DROP")

    def drop_large_packets(self, a: int, b: int, largest: int = 1200) -> None:
        """Drop large packets between two hosts, like a path whose MTU is smaller than that of both ends."""
        for src, dst in ((a, b), (b, a)):
            long = ("-m", "length", "--length", f"{largest}:")
            self.on(src, "iptables", "-A", "OUTPUT", "-d", self.address(dst), *long, "-j", "DROP")

    def flap(self, host: int, up_s: float, down_s: float) -> None:
        """Take the carrier of a host away and restore it, repeatedly."""
        end = self.bridge_port(host)
        command = f"ip link set {end} down && sleep {down_s} && ip link set {end} up && sleep {up_s}"
        self._flapping.append(subprocess.Popen(["sh", "-c", f"sleep {up_s}; while {command}; do :; done"]))

    def divide(self, at: int, rate: str) -> None:
        """Move hosts from number ``at`` on to a second switch with an uplink of that rate."""
        ends = (f"cku{self._id}a", f"cku{self._id}b")
        do("ip", "link", "add", self._second_bridge, "type", "bridge")
        do("ip", "link", "set", self._second_bridge, "up")
        do("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, bridge in zip(ends, (self._bridge, self._second_bridge), strict=True):
            do("ip", "link", "set", end, "master", bridge, "up")
            do("tc", "qdisc", "replace", "dev", end, "root", "tbf", "rate", rate, *_BURST)
        for host in range(at, self.hosts):
            do("ip", "link", "set", self.bridge_port(host), "master", self._second_bridge)

    def other_nic(self, host: int, name: str = "mgmt0") -> None:
        """Add an interface with an address that no other host can reach."""
        self.on(host, "ip", "link", "add", name, "type", "bridge")
        self.on(host, "ip", "addr", "add", "192.168.250.1/24", "dev", name)
        self.on(host, "ip", "link", "set", name, "up")

    def confine(self, host: int, *, cpus: float | None = None, memory_bytes: int | None = None) -> None:
        """Give the processes of a host a CPU quota, a memory limit, or both, as a container has them."""
        version_2 = _unified()
        values = {"memory": None if memory_bytes is None else str(memory_bytes), "cpu": None}
        if cpus is not None:
            values["cpu"] = f"{int(cpus * _CPU_PERIOD_US)}{f' {_CPU_PERIOD_US}' if version_2 else ''}"
        for controller, value in values.items():
            if value is None:
                continue
            if version_2:
                (_CGROUPS / "cgroup.subtree_control").write_text(f"+{controller}")
            group = (_CGROUPS if version_2 else _CGROUPS / controller) / self.name(host)
            group.mkdir(exist_ok=True)
            (group / _CGROUP_FILES[controller][0 if version_2 else 1]).write_text(value)
            self._cgroups.setdefault(host, []).append(group)

    # -- runs ------------------------------------------------------------------------------------------

    def on(self, host: int, *command: str) -> None:
        """Run a command on a host."""
        do("ip", "netns", "exec", self.name(host), *command)

    def start(
        self,
        keep: Path,
        *arguments: str,
        environment: Mapping[int, Mapping[str, str]] | None = None,
        world: int | None = None,
    ) -> Job:
        """Start the checklist on all hosts, as torchrun would with one process each."""
        keep.mkdir(parents=True, exist_ok=True)
        job = Job(processes=[], json=keep / "result.json", begin=time.monotonic(), keep=keep)
        self._jobs.append(job)
        for host in range(self.hosts):
            host_environment = (environment or {}).get(host, {})
            joins, shows = self._cgroup_commands(host)
            command = ["sh", "-c", f'{joins}exec "$@"', "sh"]
            command += ["ip", "netns", "exec", self.name(host), "unshare", "--uts"]
            command += ["sh", "-c", f'{shows}hostname {self.called[host]} && exec "$@"', "sh"]
            command += [sys.executable, "-m", "checklist", *arguments, "--keep", str(keep / f"host{host}")]
            command += ["--json", str(keep / ("result.json" if host == 0 else f"result{host}.json"))]
            with (keep / f"host{host}.txt").open("w") as output:
                job.processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                        cwd=ROOT,
                        env=self._environment(host, host_environment, self.hosts if world is None else world),
                    )
                )
        return job

    def _cgroup_commands(self, host: int) -> tuple[str, str]:
        """Return shell commands that join a host's cgroups and mount them, as "ip netns exec" hides them."""
        groups = self._cgroups.get(host, [])
        joins = "".join(f"echo $$ > {group}/cgroup.procs && " for group in groups)
        if not groups or _unified():
            return joins, f"mount -t cgroup2 none {_CGROUPS} && " if groups else ""
        shows = f"mount -t tmpfs none {_CGROUPS} && "
        for top in dict.fromkeys(group.parent for group in groups):
            shows += f"mkdir {top} && mount -t cgroup -o {top.name} none {top} && "
        return joins, shows

    def _environment(self, host: int, host_environment: Mapping[str, str], world: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(host),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            "CHECKLIST_HOST_ID": self.name(host),  # one kernel has one boot id
            "NODE_NAME": self.called[host],
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": str(ROOT),
            **host_environment,
        }

    def run(self, keep: Path, *arguments: str, limit_s: float = 60.0, **overrides: object) -> Job:
        """Start the checklist and wait for it."""
        job = self.start(keep, *arguments, **overrides)  # type: ignore[arg-type]
        job.wait(limit_s)
        return job

    def pids(self, host: int) -> list[int]:
        """Return the processes on a host."""
        command = ["ip", "netns", "pids", self.name(host)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(pid) for pid in done.stdout.split()]

    def worker(self, host: int) -> int | None:
        """Return the process of a host that takes part in the collectives."""
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                if b"checklist.run.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def close(self) -> None:
        """Remove all processes, namespaces, interfaces and files."""
        for turns in self._flapping:
            turns.kill()
            turns.wait()
        for host in range(self.hosts):
            for pid in self.pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for job in self._jobs:
            for process in job.processes:
                process.kill()
                process.wait()
        for group in (group for groups in self._cgroups.values() for group in groups):
            with contextlib.suppress(OSError):
                group.rmdir()
        commands: list[Sequence[str]] = [
            ("ip", "link", "del", self.bridge_port(host)) for host in range(self.hosts)
        ]
        commands += [("ip", "netns", "del", self.name(host)) for host in range(self.hosts)]
        commands += [("ip", "link", "del", f"cku{self._id}a")]
        commands += [("ip", "link", "del", bridge) for bridge in (self._bridge, self._second_bridge)]
        for command in commands:
            subprocess.run(command, capture_output=True, check=False)
        _NEIGHBORS.write_text(self._neighbors)
        for host in range(self.hosts):
            shutil.rmtree(_NETNS / self.name(host), ignore_errors=True)


@contextlib.contextmanager
def bridged_hosts(
    hosts: int, rate: str = RATE, *, ipv6: bool = False, dual: bool = False
) -> Iterator[BridgedHosts]:
    """Make hosts for the duration of a block."""
    with contextlib.closing(BridgedHosts(hosts, rate, ipv6=ipv6, dual=dual)) as network:
        yield network
