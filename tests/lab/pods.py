"""Pods as processes: each with its own network, and a Python without the packages of this project.

A pod is a command in new network, process, mount, host name and IPC namespaces, as a container runtime
makes them: its own IP address on a bridge, its own /tmp (where its home is) and /dev/shm, the rest of the
machine read-only, a memory limit, the names of the other pods in /etc/hosts, and no way out to any other
network. It shares the machine's kernel and files with everything else: no image is unpacked.

The bridge is in a network namespace of its own, the hub. Servers and clients that pods are to meet run
there. When the test process ends, in whatever way, all of it is gone (guardian.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import psutil

from tests.checklist.netns import do, missing
from tests.lab import code_cache, guardian, log_uploads, small_engine
from tests.lab.memory_limits import MemoryLimit

__all__ = ["Exit", "Hub", "Pod", "PodSpec", "missing"]

ROOT = Path(__file__).parents[2]
ADDRESS = "198.18.0.1"  # of the range for tests (RFC 2544): it cannot be anybody's
HOME = "/tmp/home"
PYTHON = "/tmp/python"
CODE_CACHE = "/tmp/code-cache"
# What an image's ENV would say.
IMAGE_ENVIRONMENT = {
    "HOME": HOME,
    "PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "METAFLOW_SKIP_INSTALL_DEPENDENCIES": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "METAFLOW_S3_WORKER_COUNT": "2",  # of 64: all pods share a few cores
}
# Without it a pod's network would be as fast as the processor is free, and no direction like the other
_NETWORK = ("rate", "1gbit", "burst", "512kb", "latency", "100ms")
_NOT_FOR_CLIENTS = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_CLONE_NEWNET = 0x40000000
# The shell that waits stays outside of the new process namespace: its child is number 1 in there.
_FIRST = 'setpriv --pdeathsig KILL sh -e "$1"'
_LOOK_S = 0.05  # how often a pod is looked at
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """The specification of a pod."""

    name: str
    hostname: str
    aliases: tuple[str, ...] = ()  # names by which others find it, besides its host name
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # over IMAGE_ENVIRONMENT
    memory_bytes: int | None = None
    shm_bytes: int | None = None  # of /dev/shm; None: 64 MiB, as container runtimes give
    empty_dirs: Mapping[str, int | None] = field(default_factory=dict)
    # mount path (there is such a folder here, or it is below /tmp) -> bytes of a tmpfs; None: on the disk


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of a pod."""

    code: int  # 128 + signal where one has ended it
    reason: Literal["OOMKilled", "Error", "Completed"]


def _setns(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _new_namespace() -> int:
    """Return a file descriptor of a new network namespace, which lives as long as the descriptor."""
    namespaces_made: list[int | OSError] = []

    def make() -> None:  # in a thread, because that changes the namespace of the thread that does it
        if _LIBC.unshare(_CLONE_NEWNET):
            namespaces_made.append(OSError(ctypes.get_errno(), "unshare"))
        else:
            namespaces_made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(namespaces_made[0], OSError):
        raise namespaces_made[0]
    return namespaces_made[0]


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Pod:
    """A started pod."""

    def __init__(
        self,
        spec: PodSpec,
        ip: str,
        folder: Path,
        namespace: int,
        limit: MemoryLimit | None,
        release: Callable[[str], None],  # is told the namespace's name when nothing is in there any more
    ) -> None:
        self.spec, self.ip, self.folder = spec, ip, folder
        self.log = folder / "log"
        self._namespace, self._limit, self._release = namespace, limit, release
        self._name = guardian.name_of(namespace)
        self._exit: Exit | None = None
        self._left: list[int] = []
        self._lock = threading.Lock()
        with self.log.open("wb") as output:
            # Not the test process's group: a Ctrl-C there is not one here.
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, name=f"pod-{spec.name}", daemon=True).start()

    def _command(self) -> list[str]:
        join = self._limit.join if self._limit is not None else ":"
        enter = ["nsenter", f"--net={_path(self._namespace)}"]
        enter += ["unshare", "--mount", "--uts", "--ipc", "--pid", "sh", "-c", f"{_FIRST}; exit $?", "sh"]
        return ["sh", "-ec", f'{join}; exec "$@"', "sh", *enter, str(self._script())]

    def _script(self) -> Path:
        """Return the commands run in the new namespaces before the command of the pod."""
        spec, pod_paths = self.spec, self.folder
        tmp = pod_paths / "tmp"
        (tmp / "home").mkdir(parents=True)
        mounts = [
            ["mount", "-t", "proc", "proc", "/proc"],
            ["mount", "--bind", "/", "/"],
            ["mount", "-o", "remount,bind,ro", "/"],
        ]
        mounts += [["mount", "--bind", str(pod_paths.parent / name), f"/etc/{name}"] for name in Hub.ETC]
        for path in (PYTHON, CODE_CACHE):
            name = Path(path).name
            (tmp / name).mkdir()
            mounts.append(["mount", "--bind", str(pod_paths.parent / name), str(tmp / name)])
        for folder in folders_below_tmp():
            copied_path = tmp / folder.relative_to("/tmp")
            copied_path.mkdir(parents=True, exist_ok=True)
            mounts.append(["mount", "--bind", str(folder), str(copied_path)])
        mounts.append(["mount", "--rbind", str(tmp), "/tmp"])
        mounts += [["mount", "-o", "remount,bind,rw", path] for path in ("/tmp", CODE_CACHE)]
        sizes = {"/dev/shm": spec.shm_bytes or 64 * 2**20, **spec.empty_dirs}
        for number, (path, size) in enumerate(sizes.items()):
            if path.startswith("/tmp/"):
                mounts.append(["mkdir", "-p", path])
            elif not Path(path).is_dir():
                raise ValueError(f"{spec.name}: {path} cannot be a mount path: there is no such folder here")
            if size is not None:
                mounts.append(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path])
            else:
                (tmp / f".empty{number}").mkdir()
                mounts.append(["mount", "--bind", f"/tmp/.empty{number}", path])
        variables = {**IMAGE_ENVIRONMENT, "HOSTNAME": spec.hostname, **spec.environment}
        start = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *spec.command]
        lines = [shlex.join(each) for each in (*mounts, ["hostname", spec.hostname], ["cd", HOME])]
        script = pod_paths / "start.sh"
        script.touch(mode=0o600)  # it holds the environment
        script.write_text("\n".join([*lines, f"exec {shlex.join(start)}", ""]))
        return script

    def poll(self) -> Exit | None:
        """Return how the pod has ended, or None while it runs."""
        with self._lock:
            return self._exit

    def wait(self, limit_s: float) -> Exit:
        """Wait for the end; raises TimeoutError at the limit."""
        deadline = time.monotonic() + limit_s
        while (ended := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"pod {self.spec.name} still runs after {limit_s:g} s")
            time.sleep(_LOOK_S)
        return ended

    def kill(self, grace_s: float = 0.0) -> None:
        """Send SIGTERM to the first process, and SIGKILL to all after the grace period."""
        if grace_s > 0:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                self.wait(grace_s)
        while self.poll() is None:
            self._signal(signal.SIGKILL)
            time.sleep(_LOOK_S)

    def run(self, command: Sequence[str]) -> None:
        """Run a command inside the pod with its environment, like a hook of kubelet, and wait for it."""
        for first in psutil.Process(self._process.pid).children() if command else ():
            # Its root is its own: another mount lies on that of its namespace
            inside = ["--pid", "--mount", "--net", "--uts", "--ipc", "--root", "--wd"]
            enter = ["nsenter", "--target", str(first.pid), *inside]
            subprocess.run([*enter, *command], env=first.environ(), check=False)

    def pids(self) -> list[int]:
        """Return its processes with the ids of this machine."""
        with self._lock:
            if self._exit is not None:
                return self._left
            return [pid for pid in guardian.inside({self._name}) if pid != self._process.pid]

    def _signal(self, number: signal.Signals) -> None:
        """Signal the first process; when it ends, the kernel kills the others."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                child.send_signal(number)

    def _watch(self) -> None:
        out_of_memory = False
        while (code := self._process.poll()) is None:
            if self._limit is not None and self._limit.exceeded(self._name):
                out_of_memory = True  # as kubelet with cgroup v2: the pod's processes die together
                self._signal(signal.SIGKILL)
            time.sleep(_LOOK_S)
        if self._limit is not None:
            out_of_memory = out_of_memory or self._limit.exceeded(self._name)
            self._limit.remove()
        code = 128 - code if code < 0 else code
        reason: Literal["OOMKilled", "Error", "Completed"] = "Error" if code else "Completed"
        ended = Exit(code=137, reason="OOMKilled") if out_of_memory else Exit(code=code, reason=reason)
        leftover = self.pids()
        self._release(self._name)
        os.close(self._namespace)  # its network goes with it
        with self._lock:
            self._left, self._exit = leftover, ended


def folders_below_tmp() -> list[Path]:
    """This clone and Python where they lie below /tmp: a pod, which has its own, sees them all the same."""
    folders: list[Path] = []
    for folder in sorted(map(Path, {str(ROOT), sysconfig.get_path("purelib"), sys.base_prefix})):
        if folder.is_relative_to("/tmp") and not any(map(folder.is_relative_to, folders)):
            folders.append(folder)
    return folders


class Hub:
    """The network shared by pods, servers and clients; a context manager, safe for threads."""

    ETC: tuple[str, ...] = ("hosts", "resolv.conf", "nsswitch.conf")

    def __init__(self, folder: Path) -> None:
        """``folder``: an empty folder for the files of pods, ``folder/NAME.N`` each."""
        self.folder = folder
        self.address = ADDRESS
        self.pods: list[Pod] = []
        self._numbers = itertools.count(1)
        self._names: dict[str, str] = {"hub": ADDRESS}
        self._lock = threading.Lock()

    def __enter__(self) -> Hub:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", guardian.__file__],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._namespace = _new_namespace()
            self._guard("namespace", guardian.name_of(self._namespace), _path(self._namespace))
            self._ip("link", "set", "lo", "up")
            # Without a MAC of its own a bridge takes one of its ports', and changes it when that goes.
            mac = ("address", "02:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(5)))
            self._ip("link", "add", "br0", *mac, "type", "bridge")
            self._ip("addr", "add", f"{ADDRESS}/16", "dev", "br0")
            self._ip("link", "set", "br0", "up")
            self._make_image()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all processes, namespaces and control groups."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait(guardian.LIMIT_S + 10)
        for pod in self.pods:
            pod.wait(30)
        if (descriptor := self.__dict__.pop("_namespace", None)) is not None:
            os.close(descriptor)

    def _make_image(self) -> None:
        """Create a Python with all packages installed here except this project."""
        for name, content in zip(self.ETC, ("", "", "hosts: files\n"), strict=True):
            (self.folder / name).write_text(content)  # no name server: an unknown name is so at once
        python = self.folder / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python)], check=True)
        (site_packages,) = (python / "lib").glob("python*/site-packages")
        # Folders named by a .pth file are not searched for more of them: an editable install isn't found.
        (site_packages / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
        small_engine.install(site_packages)  # for runs that ask for it
        code_cache.install(site_packages, home=HOME, cache=CODE_CACHE)
        log_uploads.install(site_packages)
        (self.folder / Path(CODE_CACHE).name).mkdir()
        self._write_hosts()

    def _write_hosts(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in self._names.items())]
        with (self.folder / "hosts").open("r+") as file:  # the same file: it is mounted into every pod
            file.write("\n".join(lines) + "\n")
            file.truncate()

    def _guard(self, *arguments: str) -> None:
        assert self._guardian.stdin is not None
        with self._lock, contextlib.suppress(ValueError):  # closed: it is at work already
            self._guardian.stdin.write(" ".join(arguments) + "\n")
            self._guardian.stdin.flush()

    def _ip(self, *arguments: str, inside: int | None = None) -> None:
        namespace = self._namespace if inside is None else inside
        do("nsenter", f"--net={_path(namespace)}", "ip", *arguments)

    def start(self, spec: PodSpec) -> Pod:
        """Start a pod. Its names become known to all pods."""
        with self._lock:
            number = next(self._numbers)
        ip = f"198.18.{number // 250 + 1}.{number % 250 + 1}"
        folder = self.folder / f"{spec.name}.{number}"
        folder.mkdir()
        namespace = _new_namespace()
        self._guard("namespace", guardian.name_of(namespace), _path(namespace))
        wire = f"pod{number}"
        self._ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", _path(namespace))
        self._ip("link", "set", wire, "master", "br0", "up")
        self._ip("link", "set", "lo", "up", inside=namespace)
        self._ip("addr", "add", f"{ip}/16", "dev", "eth0", inside=namespace)
        self._ip("link", "set", "eth0", "up", inside=namespace)
        for device, inside in (("eth0", namespace), (wire, self._namespace)):
            qdisc = ("tc", "qdisc", "add", "dev", device, "root", "tbf", *_NETWORK)
            do("nsenter", f"--net={_path(inside)}", *qdisc)
        limit = MemoryLimit(spec.memory_bytes) if spec.memory_bytes is not None else None
        if limit is not None and limit.cgroup is not None:
            self._guard("cgroup", str(limit.cgroup))
        with self._lock:
            self._names |= dict.fromkeys((spec.hostname, *spec.aliases), ip)
            self._write_hosts()
            pod = Pod(spec, ip, folder, namespace, limit, lambda name: self._guard("released", name))
            self.pods.append(pod)
        return pod

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of this process without variables that bypass the hub."""
        return {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_FOR_CLIENTS and not name.lower().endswith("_proxy")
        }

    def popen(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, **overrides: Any
    ) -> subprocess.Popen[Any]:
        """Start a process inside; killed when the hub is closed. ``overrides``: for subprocess.Popen."""
        command = ["nsenter", f"--net={_path(self._namespace)}", *arguments]
        return subprocess.Popen(command, env=dict(self.environment if env is None else env), **overrides)

    def run(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout: float,
        stdout: int | IO[str] = subprocess.PIPE,
        **more: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process inside the hub to its end; standard error is merged into standard output."""
        process = self.popen(arguments, env, stdout=stdout, stderr=subprocess.STDOUT, text=True, **more)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(list(arguments), process.returncode, output)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Create new sockets of this thread in the hub: for servers in threads and for clients.

        A socket stays where it was made, so only its making has to be in the block.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _setns(self._namespace)
            yield
        finally:
            _setns(before)
            os.close(before)
