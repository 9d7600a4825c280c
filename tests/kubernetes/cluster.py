"""A cluster of two nodes, S3 and a metadata service, and a user who launches flows on it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.flows.conftest import READ_ARTIFACTS, environment
from tests.lab import log_uploads, metadata
from tests.lab.api import Api, Json
from tests.lab.control_plane import ControlPlane, wait_for
from tests.lab.jobset import JobSets
from tests.lab.kubelet import Kubelet, Node, register
from tests.lab.object_store import ObjectStore
from tests.lab.pods import Hub, Pod

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example/finetune:1"
NAMESPACE = "finetune"  # of infra/kubernetes
SERVICE_ACCOUNT = "flow"
INSTANCE_TYPE = "m5.16xlarge"
ENDED = ("Succeeded", "Failed")


@dataclass
class Cluster:
    """Access to the cluster for a test."""

    folder: Path
    hub: Hub
    store: ObjectStore
    control_plane: ControlPlane
    jobsets: JobSets
    metadata_url: str
    kubelets: list[Kubelet] = field(default_factory=list)

    @property
    def api(self) -> Api:
        return self.control_plane.api()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return a user's environment on a machine that can reach the cluster."""
        variables = environment(home)
        for name in ("METAFLOW_DATASTORE_SYSROOT_LOCAL", "METAFLOW_DEFAULT_METADATA"):
            del variables[name]
        return {
            **variables,
            **self.store.environment(),
            "METAFLOW_DEFAULT_METADATA": "service",
            "METAFLOW_SERVICE_URL": self.metadata_url,
            "METAFLOW_SERVICE_INTERNAL_URL": self.metadata_url,
            "KUBECONFIG": str(self.control_plane.kubeconfig("launcher", NAMESPACE)),
            "METAFLOW_KUBERNETES_NAMESPACE": NAMESPACE,
            "METAFLOW_KUBERNETES_SERVICE_ACCOUNT": SERVICE_ACCOUNT,
            "METAFLOW_KUBERNETES_CONTAINER_IMAGE": IMAGE,
            "PYTHONPATH": str(log_uploads.install_for_clients(self.folder / "client-site")),
            **more,
        }

    def pods(self, namespace: str = NAMESPACE) -> list[Json]:
        return self.api.items(f"/api/v1/namespaces/{namespace}/pods")

    def pod(self, manifest: Json) -> Pod | None:
        """Return the processes of a pod of the API server, or None if it is not running."""
        name = manifest["metadata"]["name"]
        return next((pod for each in self.kubelets for pod in each.pods() if pod.spec.name == name), None)

    def kubelet_of(self, manifest: Json) -> Kubelet:
        """Return the node to which a pod is assigned."""
        return next(each for each in self.kubelets if each.node.name == manifest["spec"]["nodeName"])

    def running(self) -> list[str]:
        """Names of pods that have not ended according to the API server or their nodes."""
        running_pods = [p["metadata"]["name"] for p in self.pods() if p["status"].get("phase") not in ENDED]
        return sorted(
            {*running_pods, *(pod.spec.name for kubelet in self.kubelets for pod in kubelet.pods())}
        )

    def logs(self) -> dict[str, str]:
        """The output of every pod so far."""
        return {pod.folder.name: pod.log.read_text(errors="replace") for pod in self.hub.pods}

    def launch(self, flow: str, home: Path, *arguments: str, folder: str = "flows", **more: str) -> Launched:
        """Run ``python FOLDER/FLOW.py ARGUMENTS`` in the folder ``home``."""
        # A shell's background jobs ignore a Ctrl-C, and so would this if pytest were one.
        command = ["env", "--default-signal=INT", sys.executable]
        command += [str(ROOT / folder / f"{flow}.py"), *arguments]
        variables = self.environment(home, **more)
        home.mkdir(parents=True, exist_ok=True)
        (home / "run_id").unlink(missing_ok=True)
        with (home / "log").open("w") as log:
            process = self.hub.popen(
                [*command, "--run-id-file", str(home / "run_id")]
                if arguments[0] in ("run", "resume")
                else command,
                variables,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Launched(self, home, variables, process)

    def add_machine(self, node: Node) -> None:
        """Add a node on which pods can be placed but whose containers never start."""
        register(self.api, node, self.hub.address)

    def add_node(self, node: Node) -> Kubelet:
        # One kernel plays several machines, which the checklist would notice.
        variables = {**self.store.credentials(), "CHECKLIST_HOST_ID": node.name}
        kubelet = Kubelet(node, self.api, self.hub, {IMAGE: variables}, self.folder / "agents.log")
        kubelet.__enter__()
        self.kubelets.append(kubelet)
        return kubelet


@dataclass
class Launched:
    """A started flow."""

    cluster: Cluster
    home: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def has_begun(self) -> bool:
        """Return whether the run has an id; pods of earlier runs may exist."""
        return (self.home / "run_id").exists()

    @property
    def run_id(self) -> str:
        return (self.home / "run_id").read_text()

    def wait(self, within: float) -> int:
        """Return the exit status; fails with the complete output if the run does not end in time."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within:g} s:\n{self.full_log()}") from None

    def full_log(self) -> str:
        """Return the terminal output and the output of pods, for failure messages."""
        logs = "\n".join(f"--- {name}\n{text[-3000:]}" for name, text in self.cluster.logs().items())
        return f"{self.log}\n{logs}"

    def read(self, program: str, *arguments: str, timeout: float = 180) -> bytes:
        """Run a program with the Metaflow client as this user; return its output."""
        process = self.cluster.hub.popen(
            [sys.executable, "-c", program, *arguments],
            self.environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
        )
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, output
        return bytes(output)

    def artifacts(self, flow: str) -> dict[str, Any]:
        stored_artifacts: dict[str, Any] = pickle.loads(self.read(READ_ARTIFACTS, f"{flow}/{self.run_id}"))  # noqa: S301
        return stored_artifacts

    def nothing_left(self, within: float = 30) -> None:
        wait_for(lambda: not self.cluster.running(), within, f"no pod is left: {self.cluster.running()}")


@contextmanager
def start(folder: Path) -> Iterator[Cluster]:
    """Start the whole cluster; nothing is left afterwards."""
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(folder / "pods"))
        inside: dict[str, Any] = {"address": hub.address, "inside": hub.inside}
        store = stack.enter_context(ObjectStore(folder, **inside))
        users = {"launcher": ("finetune-launchers",), "nobody": ()}
        plane = stack.enter_context(ControlPlane(folder / "control-plane", users=users, **inside))
        url = stack.enter_context(metadata.serve(hub))
        plane.kubectl("apply", "--validate=false", "-k", str(ROOT / "infra" / "kubernetes" / "base"))
        jobsets = JobSets(plane.api(), folder / "agents.log")
        stack.enter_context(jobsets)
        cluster = Cluster(folder, hub, store, plane, jobsets, url)
        stack.callback(_stop, cluster)
        for zone in "ab":
            cluster.add_node(Node(name=f"node-{zone}", instance_type=INSTANCE_TYPE))
        yield cluster
        problems = [text for agent in (jobsets, *cluster.kubelets) for text in agent.problems]
        assert not problems, problems


def _stop(cluster: Cluster) -> None:
    for kubelet in cluster.kubelets:
        kubelet.__exit__()
