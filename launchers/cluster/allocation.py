"""Allocation of a command that a scheduler starts once on each node: Slurm, PBS, OpenMPI, torchrun."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from estimator.errors import UserError
from estimator.plan import MIB
from launchers.cluster.endpoint import NodeAddress, Secret

FIRST_PORT = 29_400
PORTS = 8  # candidate ports of the control channel; jobs on the same host use different ones
_SLOTS = 64  # groups of ports, assigned to jobs by job number
SCONTROL_S = 5.0  # time limit; scontrol expands lists locally
_RANGE = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)
_MAX_HOSTS = 100_000  # of one range; the largest clusters have fewer nodes
_HOST = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """This node's position among the nodes of its job."""

    scheduler: str  # "slurm", "pbs", "mpi", "torchrun"; "none": one node, started manually
    job: str  # scheduler's job id; the same on all nodes, and after a requeue
    attempt: str  # distinguishes the starts of a job; the same on all nodes
    node: int  # 0: the main node
    nodes: int
    main_host: str  # name or address of node 0
    ports: tuple[int, ...]
    memory_bytes: int | None = None  # memory per node that the job may use; None: unknown

    def address(self, secret: Secret, purpose: str) -> NodeAddress:
        """Return the node's address for a rendezvous with this ``purpose``; ``secret`` is the run's."""
        return NodeAddress(
            node=self.node,
            nodes=self.nodes,
            main_host=self.main_host,
            ports=self.ports,
            secret=secret,
            run=f"{self.job}/{self.attempt}/{purpose}",
        )


def node_address(environment: Mapping[str, str] = os.environ, *, hostname: str | None = None) -> Allocation:
    """Detect this node's position from the variables that torchrun, srun, mpiexec or PBS set.

    Without any of them: a single node, this one. ``hostname``: name of this host (default: detected).

    Raises UserError for an unsupported start: several tasks per node, several nodes without srun, or an empty
    variable.
    """
    if "GROUP_RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _slurm(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _mpi(environment, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if "PMI_RANK" in environment and "PMI_SIZE" in environment:  # MPICH, Intel MPI, Cray PALS
        return _mpi(environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
    if "PBS_JOBID" in environment:
        return _pbs(environment, hostname or socket.gethostname())
    if "SLURM_JOB_ID" in environment:
        return _slurm_without_srun(environment)
    return _single_node("none", str(os.getpid()))


def expand_hosts(nodelist: str) -> list[str]:
    """Expand Slurm's host list: ``gpu[03-05,9],login`` is gpu03, gpu04, gpu05, gpu9, login.

    Uses Slurm (``scontrol show hostnames``) if it is installed and can parse the list: not every version
    supports names with several brackets, such as ``rack[1-2]n[0-1]`` (the last one runs fastest).

    Raises UserError for an invalid list.
    """
    if "[" not in nodelist and "]" not in nodelist:
        return [host for host in nodelist.split(",") if host]
    return _hosts_of_scontrol(nodelist) or _hosts_of_ranges(nodelist)


def _hosts_of_scontrol(nodelist: str) -> list[str]:
    """Expand the list with scontrol; empty if it is missing, fails or does not respond in time."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return []
    try:
        process = subprocess.run(
            [scontrol, "show", "hostnames", nodelist],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCONTROL_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: no UTF-8, or a null byte
        return []
    hosts = process.stdout.splitlines()
    return hosts if all(_HOST.fullmatch(host) for host in hosts) else []


def _hosts_of_ranges(nodelist: str) -> list[str]:
    """Expand a host list without scontrol; python-hostlist could do it, but is under the GPL."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\[\]]*\]|\[)+", nodelist):
        pieces = re.split(r"\[([^\[\]]*)\]", entry)  # text, ranges, text, ranges, ..., text
        if any(bracket in text for text in pieces[::2] for bracket in "[]"):
            raise _no_hosts(nodelist, entry)
        choices = [_numbers(part, nodelist) if index % 2 else [part] for index, part in enumerate(pieces)]
        if math.prod(map(len, choices)) > _MAX_HOSTS:
            raise _no_hosts(nodelist, entry)
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """Expand ``03-05,9`` to 03, 04, 05, 9; leading zeros are kept."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or not 0 <= int(match[2] or match[1]) - int(match[1]) < _MAX_HOSTS:
            raise _no_hosts(nodelist, part)
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _no_hosts(nodelist: str, part: str) -> UserError:
    return UserError(
        f"The scheduler's list of nodes {nodelist[:200]!r} is invalid: {part[:100]!r} is not a range.",
        "Check SLURM_STEP_NODELIST; scontrol show hostnames must be able to parse it.",
    )


def _torchrun(environment: Mapping[str, str]) -> Allocation:
    if read_number(environment, "LOCAL_WORLD_SIZE", 1) > 1:
        raise _several("torchrun", "--nproc-per-node 1")
    first = read_number(environment, "MASTER_PORT", FIRST_PORT) + 1  # MASTER_PORT is for torchrun
    return Allocation(
        scheduler="torchrun",
        job=environment.get("TORCHELASTIC_RUN_ID", ""),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        node=read_number(environment, "GROUP_RANK"),
        nodes=read_number(environment, "GROUP_WORLD_SIZE", read_number(environment, "WORLD_SIZE")),
        main_host=environment.get("MASTER_ADDR") or "127.0.0.1",
        ports=_ports(first),
    )


def _slurm(environment: Mapping[str, str]) -> Allocation:
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # "1(x4)", "2,1(x3)"
    if any(int(count) > 1 for count in re.findall(r"(?:^|,)(\d+)", tasks)):
        raise _several("srun", "--ntasks-per-node=1")
    hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
    nodes = read_number(environment, "SLURM_STEP_NUM_NODES", len(hosts))
    main_host = environment.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if not main_host:
        raise UserError(
            "The nodes of the job are unknown: srun has set no SLURM_STEP_NODELIST.",
            "Set MASTER_ADDR to the first host of the job.",
        )
    job = environment.get("SLURM_JOB_ID", "")
    return Allocation(
        scheduler="slurm",
        job=job,
        attempt=f"{environment.get('SLURM_RESTART_COUNT', '0')}.{environment['SLURM_STEP_ID']}",
        node=read_number(environment, "SLURM_NODEID"),
        nodes=nodes,
        main_host=main_host if nodes > 1 else "127.0.0.1",
        ports=_ports_of_job(environment, job),
        memory_bytes=_slurm_memory(environment),
    )


def _slurm_without_srun(environment: Mapping[str, str]) -> Allocation:
    nodes = read_number(environment, "SLURM_JOB_NUM_NODES", 1)
    if nodes > 1:
        raise UserError(
            f"This job has {nodes} nodes, but the command runs on one of them only.",
            "Start it with srun: srun --ntasks-per-node=1 python -m launchers ...",
        )
    job = environment["SLURM_JOB_ID"]
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return _single_node("slurm", job, attempt=restarts, memory_bytes=_slurm_memory(environment))


def _slurm_memory(environment: Mapping[str, str]) -> int | None:
    """Read --mem or --mem-per-cpu, which Slurm gives in MiB; 0 means all memory of the node."""
    per_node = read_number(environment, "SLURM_MEM_PER_NODE", 0)
    cpu_memory = read_number(environment, "SLURM_MEM_PER_CPU", 0) * read_number(
        environment, "SLURM_CPUS_ON_NODE", 0
    )
    return (per_node or cpu_memory) * MIB or None


def _mpi(environment: Mapping[str, str], rank: str, size: str, local_size: str) -> Allocation:
    if read_number(environment, local_size, 1) > 1:
        raise _several("mpiexec", "one process on each node (OpenMPI: --map-by ppr:1:node)")
    nodes = read_number(environment, size)
    hosts = _node_file(environment)
    main_host = environment.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    if nodes > 1 and not main_host:
        raise UserError(
            "The host of process 0 is unknown: mpiexec does not provide it.",
            "Export MASTER_ADDR with the first host's name to all processes (OpenMPI: -x MASTER_ADDR).",
        )
    job = environment.get("PBS_JOBID") or environment.get("SLURM_JOB_ID") or ""
    return Allocation(
        scheduler="pbs" if "PBS_JOBID" in environment else "mpi",
        job=job,
        attempt=environment.get("OMPI_MCA_ess_base_jobid", environment.get("PALS_APID", "0")),
        node=read_number(environment, rank),
        nodes=nodes,
        main_host=main_host if nodes > 1 else "127.0.0.1",
        ports=_ports_of_job(environment, job),
    )


def _pbs(environment: Mapping[str, str], hostname: str) -> Allocation:
    """Detect the position under pbsdsh by looking up the host's name in the job's list."""
    job = environment["PBS_JOBID"]
    hosts = _node_file(environment)
    if hosts is None:
        raise UserError(
            f"PBS_NODEFILE ({environment.get('PBS_NODEFILE') or 'not set'}) cannot be read on {hostname}.",
            "PBS keeps it only on the first node: copy it to a shared folder, and set it to the copy.",
        )
    if len(hosts) == 1:
        return _single_node("pbs", job)
    short = [host.partition(".")[0] for host in hosts]
    if hostname.partition(".")[0] not in short:
        raise UserError(f"{hostname} is not one of the job's nodes: {', '.join(hosts)}.")
    return Allocation(
        scheduler="pbs",
        job=job,
        attempt="0",
        node=short.index(hostname.partition(".")[0]),
        nodes=len(hosts),
        main_host=environment.get("MASTER_ADDR") or hosts[0],
        ports=_ports_of_job(environment, job),
    )


def _node_file(environment: Mapping[str, str]) -> list[str] | None:
    """Read the distinct hosts of PBS_NODEFILE; None if there is no such file."""
    try:
        lines = Path(environment.get("PBS_NODEFILE", "")).read_text().split()
    except OSError:
        return None
    return list(dict.fromkeys(lines)) or None


def _single_node(scheduler: str, job: str, attempt: str = "0", memory_bytes: int | None = None) -> Allocation:
    return Allocation(
        scheduler=scheduler,
        job=job,
        attempt=attempt,
        node=0,
        nodes=1,
        main_host="127.0.0.1",
        ports=(),
        memory_bytes=memory_bytes,
    )


def _ports_of_job(environment: Mapping[str, str], job: str) -> tuple[int, ...]:
    """Return the run's TCP ports, equal on all nodes; jobs that share a host usually get different ones."""
    if "MASTER_PORT" in environment:
        return _ports(read_number(environment, "MASTER_PORT") + 1)
    digits = re.match(r"\d+", job)
    return _ports(FIRST_PORT + PORTS * (int(digits[0]) % _SLOTS if digits else 0))


def _ports(first: int) -> tuple[int, ...]:
    return tuple(range(first, first + PORTS)) if first + PORTS < 65_536 else _ports(FIRST_PORT)


def _several(launcher: str, advice: str) -> UserError:
    return UserError(
        f"{launcher} has started several processes on a node; exactly one is needed, which starts the ranks.",
        f"Run {launcher} with {advice}.",
    )


def read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read an integer variable of the scheduler or launcher; UserError if it is not one."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(
            f"{name} is {text!r}, which is not an integer.", "Check how the job was started."
        ) from None
