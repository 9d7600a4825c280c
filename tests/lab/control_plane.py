"""A real Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

The binaries are found as envtest finds them: ``TEST_ASSET_KUBE_APISERVER``, ``TEST_ASSET_ETCD`` and so on,
else the folder ``KUBEBUILDER_ASSETS``, else (etcd) the PATH. JobSet's definition is ``jobset-crd.json`` in
that folder, or ``TEST_ASSET_JOBSET_CRD``; Kueue's may be ``kueue-crds.json`` (a List) or
``TEST_ASSET_KUEUE_CRDS``. There are no nodes; tests.lab.kubelet brings some.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.lab.api import Api, Inside, Json

NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_START_S = 180.0  # 6 s on an idle machine
_OLD = (1, 24)  # before it, controller manager and scheduler also listen without TLS unless told not to
_AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ["admin", "system:apiserver"]
- level: Request
"""


def asset(name: str) -> Path | None:
    """Return the path of a binary, or None."""
    variable = "TEST_ASSET_" + name.upper().replace("-", "_")
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    candidates = [os.environ.get(variable), folder and f"{folder}/{name}", shutil.which(name)]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def jobset_definition() -> Path | None:
    """Return the CustomResourceDefinition of JobSet as JSON, or None."""
    return _definitions("TEST_ASSET_JOBSET_CRD", "jobset-crd.json")


def kueue_definitions() -> list[Json]:
    """Return the CustomResourceDefinitions of Kueue; empty if missing."""
    kueue = _definitions("TEST_ASSET_KUEUE_CRDS", "kueue-crds.json")
    return list(json.loads(kueue.read_text())["items"]) if kueue is not None else []


def _definitions(variable: str, name: str) -> Path | None:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    candidates = [os.environ.get(variable), folder and f"{folder}/{name}"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def permissive_definition(plural: str, group: str, version: str, kind: str, scope: str, path: Path) -> Path:
    """Return a definition that accepts any fields."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    listed = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": plural, "kind": kind, "singular": kind.lower(), "listKind": f"{kind}List"}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {"group": group, "scope": scope, "names": names, "versions": [listed]},
            }
        )
    )
    return path


def missing() -> str | None:
    """Return the reason why no control plane can run here, or None."""
    absent = [name for name in NAMES if asset(name) is None]
    if shutil.which("kubectl") is None:
        absent.append("kubectl")
    if absent:
        return f"no {', '.join(absent)}: KUBEBUILDER_ASSETS names the folder of a control plane's binaries"
    if jobset_definition() is None:
        return "no JobSet definition: TEST_ASSET_JOBSET_CRD names its file (JSON)"
    return None


def start_process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    inside: Inside = nullcontext,
) -> subprocess.Popen[bytes]:
    """Start a server that ends with the process of this thread; its output goes to ``log``."""
    with inside(), log.open("ab") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,  # a Ctrl-C is for pytest, which stops the servers in order
        )


def wait_for(condition: Callable[[], Any], within: float, doing: str, every: float = 0.1) -> Any:
    """Return the value of ``condition`` once it is true; fails after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s: {doing}"
        time.sleep(every)
    return value


def free_ports(number: int, address: str, inside: Inside) -> list[int]:
    with inside():
        probes = [socket.socket() for _ in range(number)]
        for probe in probes:
            probe.bind((address, 0))
        ports = [probe.getsockname()[1] for probe in probes]
        for probe in probes:
            probe.close()
    return ports


@dataclass
class ControlPlane:
    """A context manager. ``address`` belongs to the network that ``inside`` enters."""

    folder: Path
    address: str = "127.0.0.1"
    inside: Inside = nullcontext
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # beside "admin": names, and groups
    tokens: dict[str, str] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> ControlPlane:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._etcd_port, peer, self._port = free_ports(3, self.address, self.inside)
        self._write_keys()
        try:
            store = f"http://{self.address}:{self._etcd_port}"
            between = f"http://{self.address}:{peer}"
            self._start(
                "etcd",
                *("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--logger", "zap"),
                *("--listen-client-urls", store, "--advertise-client-urls", store),
                *("--listen-peer-urls", between, "--initial-advertise-peer-urls", between),
                *("--initial-cluster", f"default={between}"),
            )
            self.start_api_server()
            self._start_controllers()
            self.install("jobsets.jobset.x-k8s.io", jobset_definition())
            self._wait_for_service_account("default")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self._port}"

    @property
    def authority(self) -> Path:
        """The certificate that signs that of the server."""
        return self.folder / "certificates" / "apiserver.crt"

    def api(self, user: str = "admin") -> Api:
        """Return the API of one user."""
        return Api(self.url, authority=self.authority, token=self.tokens[user], inside=self.inside)

    def kubeconfig(self, user: str = "admin", namespace: str = "default", **replaced: Any) -> Path:
        """Write a kubeconfig; ``replaced`` sets another ``server`` or ``token`` or more user fields."""
        path = self.folder / f"kubeconfig-{user}-{namespace}-{secrets.token_hex(3)}"
        server = replaced.pop("server", self.url)
        credentials = {"token": self.tokens[user], **replaced}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [
                {"name": "lab", "context": {"cluster": "lab", "user": user, "namespace": namespace}}
            ],
            "clusters": [
                {"name": "lab", "cluster": {"server": server, "certificate-authority": str(self.authority)}}
            ],
            "users": [{"name": user, "user": credentials}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator; return its output."""
        if not hasattr(self, "_admin"):
            self._admin = self.kubeconfig()
        with self.inside():
            done = subprocess.run(
                ["kubectl", f"--kubeconfig={self._admin}", *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, *manifests: Json) -> None:
        """Create or change objects. kubectl is newer than the server: its own validation is left out."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--validate=false", "-f", "-", stdin=json.dumps(listed))

    def install(self, name: str, definition: Path | None) -> None:
        """Install a custom resource and wait until it is usable."""
        assert definition is not None
        api = self.api()
        api.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json.loads(definition.read_text())
        )
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"

        def established() -> bool:
            conditions = api.get(path).get("status", {}).get("conditions") or []
            return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

        wait_for(established, _START_S, f"{name} is established")

    def namespace(self, name: str) -> str:
        """Create a namespace; return its name when pods can be created in it."""
        self.api().create("/api/v1/namespaces", {"metadata": {"name": name}})
        self._wait_for_service_account(name)
        return name

    def service_account(self, name: str, namespace: str) -> str:
        """Return the token of a service account, created if missing."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        if not self.api().exists(f"{path}/{name}"):
            self.api().create(path, {"metadata": {"name": name}})
        answer = self.api().create(f"{path}/{name}/token", {"spec": {"audiences": []}})
        return str(answer["status"]["token"])

    def audit(self) -> list[Json]:
        """Return the requests to the server by all users but the administrator, with bodies."""
        path = self.folder / "audit.log"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    # -- processes -------------------------------------------------------------------------------------

    def start_api_server(self) -> None:
        """Start it, also after :meth:`stop_api_server`, with the same port, keys and objects."""
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://{self.address}:{self._etcd_port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--service-account-key-file={self._key}",
            f"--service-account-signing-key-file={self._key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.78.0.0/24",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self._port}",
            "--endpoint-reconciler-type=none",  # the loopback is no address for an endpoint
            "--allow-privileged=true",
            f"--audit-policy-file={self.folder / 'audit-policy.yaml'}",
            f"--audit-log-path={self.folder / 'audit.log'}",
        )
        self._wait_until(self.authority.exists, "kube-apiserver", "it has a certificate")
        self._wait_until(self.api().ready, "kube-apiserver", "it is ready")

    def stop_api_server(self) -> None:
        """Stop it as if its machine were lost: connections are cut and its port is closed."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait(10)

    def stop(self) -> None:
        for name in reversed(NAMES):
            process = self._processes.pop(name, None)
            if process is not None:
                process.kill()
                process.wait(10)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_controllers(self) -> None:
        version = self.api().get("/version")
        old = (int(version["major"]), int(version["minor"].rstrip("+"))) < _OLD
        shared = [f"--kubeconfig={self.kubeconfig()}", "--leader-elect=false", "--secure-port=0"]
        shared += ["--port=0"] if old else []
        self._start(
            "kube-controller-manager",
            *shared,
            f"--service-account-private-key-file={self._key}",
            "--use-service-account-credentials=false",
            "--controllers=*,-nodeipam,-nodelifecycle,-cloud-node-lifecycle,-route,-service,-csrsigning",
        )
        self._start("kube-scheduler", *shared)

    def _start(self, name: str, *arguments: str) -> None:
        command = [str(asset(name)), *arguments]
        log = self.folder / f"{name}.log"
        self._processes[name] = start_process(command, log, inside=self.inside)

    def _wait_until(self, condition: Callable[[], bool], name: str, doing: str) -> None:
        def done() -> bool:
            assert self._processes[name].poll() is None, f"{name} has ended:\n{self.log(name)[-3000:]}"
            return condition()

        wait_for(done, _START_S, f"{name}: {doing}")

    def _wait_for_service_account(self, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        wait_for(
            lambda: self.api().exists(path) and self.api().get(path).get("secrets"),
            _START_S,
            f"namespace {namespace} has its service account",
        )

    def _write_keys(self) -> None:
        self._key = self.folder / "service-accounts.key"
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.TraditionalOpenSSL
        self._key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
        (self.folder / "audit-policy.yaml").write_text(_AUDIT_POLICY)
        groups = {"admin": ("system:masters",), **self.users}
        self.tokens = {user: secrets.token_hex(16) for user in groups}
        with (self.folder / "tokens.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            for user, token in self.tokens.items():
                rows.writerow([token, user, f"uid-{user}", ",".join(groups[user])])
