"""A real Slurm on one machine: slurmctld of Debian and one slurmd per node, in network namespaces.

Host 0 has the controller and takes commands, hosts 1 and up are the nodes. All files lie in one folder,
munge's key and socket too; all processes end with the one that has started them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.checklist import netns

DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "setpriv")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL")
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=h0
AuthType=auth/munge
# A requeued job waits until old credentials have expired; below 5 s the default of 120 s holds.
AuthInfo=socket={folder}/munge.sock,cred_expire=6
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
TaskProlog={folder}/prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=5
JobRequeue=1
SchedulerParameters=sched_interval=2,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=h[1-{nodes}] CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=h[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""
# One kernel has one boot id; the checklist tells hosts apart by it.
PROLOG = '#!/bin/sh\necho "export CHECKLIST_HOST_ID=$SLURMD_NODENAME"\n'


def missing() -> str | None:
    """Return the reason why Slurm cannot run here, or None."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} (apt install slurm-wlm munge)"
    return netns.missing()


class Lab:
    """A cluster of ``nodes`` nodes, h1 and up, with its files in ``folder``."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = nodes
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._write()
        self._bed = netns.BridgedHosts(nodes + 1, rate="10gbit")
        try:
            self._start_munge()
            self._start("slurmctld", 0, "slurmctld", "-D")
            for node in range(1, nodes + 1):
                self.start_node(node)
            self.wait_until(lambda: self.states() == {"idle"}, 60, "nodes are idle")
        except BaseException:
            self.close()
            raise

    def _write(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        text = CONFIGURATION.format(folder=self.folder, nodes=self.nodes)
        (self.folder / "slurm.conf").write_text(text)
        # No plugin here needs control groups; what is found by itself may not be mounted in a namespace.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "prolog").write_text(PROLOG)
        (self.folder / "prolog").chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)

    def _start_munge(self) -> None:
        files = {"socket": "munge.sock", "key-file": "munge.key", "log-file": "munged.log"}
        files |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        # --force: the folder of a test may belong to somebody else than root
        self._start("munged", 0, "munged", "--foreground", "--force", "--num-threads=2", *options)
        self.wait_until((self.folder / "munge.sock").exists, 20, "munged listens")

    def start_node(self, node: int) -> None:
        """Start slurmd of a node."""
        self._start(f"slurmd-{node}", node, "slurmd", "-D", "-N", f"h{node}")

    def lose_node(self, node: int) -> None:
        """Kill all processes of a node at once, as in a power failure."""
        for pid in self._bed.pids(node):
            os.kill(pid, signal.SIGKILL)
        self._daemons.pop(f"slurmd-{node}").wait(timeout=10)

    def command(self, *arguments: str, check: bool = True, **environment: str) -> str:
        """Run a command on the login host; return its output."""
        done = subprocess.run(
            self._on(0, arguments),
            env=self._environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *arguments: str, **environment: str) -> int:
        """Run ``sbatch`` and return the job number. Output goes to ``job-NUMBER.txt`` in the folder."""
        output = f"--output={self.folder}/job-%j.txt"
        return int(self.command("sbatch", "--parsable", output, *arguments, check=True, **environment))

    def job(self, number: int) -> dict[str, str]:
        """Return the state of a job in Slurm."""
        text = self.command("scontrol", "show", "job", "-o", str(number))
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def output(self, number: int) -> str:
        """Return the output of the job."""
        file = self.folder / f"job-{number}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, number: int, limit_s: float) -> tuple[str, int]:
        """Wait for the end of a job; return its state and the exit status of its script."""
        ended: dict[str, str] = {}

        def finished() -> bool:
            nonlocal ended
            ended = self.job(number)
            return ended["JobState"] in ENDED and ended["Requeue"] in "01"

        self.wait_until(finished, limit_s, f"job {number} ends", lambda: self.output(number))
        return ended["JobState"], int(ended["ExitCode"].partition(":")[0])

    def wait_until(
        self, true: Callable[[], bool], limit_s: float, log_name: str, progress: Callable[[], str] = str
    ) -> None:
        """Wait for a condition; raises TimeoutError with the logs of the daemons."""
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{limit_s:g} s, and not: {log_name}\n{progress()}\n{self._logs()}")
            time.sleep(0.2)

    def states(self) -> set[str]:
        """Return the states of the nodes."""
        return set(self.command("sinfo", "-h", "-N", "-o", "%T", check=False).split())

    def close(self) -> None:
        """End all started processes."""
        for process in self._daemons.values():
            process.terminate()
        deadline = time.monotonic() + 10
        while any(process.poll() is None for process in self._daemons.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for process in self._daemons.values():
            process.kill()
            process.wait()
        self._bed.close()

    def _on(self, host: int, arguments: Sequence[str]) -> list[str]:
        prefix = ["ip", "netns", "exec", self._bed.name(host), "unshare", "--uts"]
        return [*prefix, "sh", "-c", f'hostname h{host} && exec "$@"', "sh", *arguments]

    def _start(self, name: str, host: int, *arguments: str) -> None:
        with (self.folder / f"{name}.txt").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._on(host, arguments)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _logs(self) -> str:
        files = [*self.folder.glob("slurm*.txt"), self.folder / "munged.txt"]
        return "\n".join(f"{f.name}: {f.read_text(errors='replace')[-1500:]}" for f in files if f.exists())
