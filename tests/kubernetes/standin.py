"""A stand-in for a Kubernetes API server, as much of it as Metaflow's client uses.

Accepts Jobs and JobSets, runs each Job's pod command as a process on this machine, and reports its
end. A JobSet is only kept, and reported as failed, so that a test can look at what was asked for.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

JOBS = re.compile(r"/apis/batch/v1/namespaces/([^/]+)/jobs(?:/([^/?]+))?")
PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods")
JOBSETS = re.compile(r"/apis/jobset.x-k8s.io/v1alpha2/namespaces/([^/]+)/jobsets(?:/([^/?]+))?")


@dataclass
class Standin:
    """What was asked for so far, and the processes that play its pods."""

    folder: Path
    pod_environment: dict[str, str]  # what a node's image and service account would give
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0

    def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        name = job["metadata"].setdefault("name", f"job-{len(self.jobs)}")
        job["metadata"]["uid"] = f"uid-{name}"
        job["status"] = {}
        self.jobs[name] = job
        container = job["spec"]["template"]["spec"]["containers"][0]
        home = self.folder / name
        home.mkdir()
        fields = {"metadata.name": name, "metadata.namespace": "default", "metadata.uid": f"uid-{name}"}
        environment = {
            variable["name"]: variable.get("value")
            or fields.get(variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", ""), "stand-in")
            for variable in container["env"]
        }
        with (home / "log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                container["command"],
                cwd=home,
                env=self.pod_environment | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return job

    def job(self, name: str) -> dict[str, Any] | None:
        job = self.jobs.get(name)
        if job is not None:
            code = self.processes[name].poll()
            job["status"] = {
                None: {"active": 1},
                0: {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
            }.get(code, {"failed": 1, "conditions": [{"type": "Failed", "status": "True"}]})
        return job

    def pods(self, selector: str) -> list[dict[str, Any]]:
        name = selector.rpartition("=")[2]
        if name not in self.processes:
            return []
        code = self.processes[name].poll()
        phase = {None: "Running", 0: "Succeeded"}.get(code, "Failed")
        terminated = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        state = {"running": {}} if code is None else {"terminated": terminated}
        status = {
            "phase": phase,
            "containerStatuses": [
                {"name": name, "image": "i", "imageID": "i", "ready": True, "restartCount": 0, "state": state}
            ],
        }
        return [{"metadata": {"name": name, "namespace": "default"}, "status": status}]

    def create_jobset(self, jobset: dict[str, Any]) -> dict[str, Any]:
        self.jobsets[jobset["metadata"]["name"]] = jobset
        return jobset

    def jobset(self, name: str) -> dict[str, Any] | None:
        jobset = self.jobsets.get(name)
        return None if jobset is None else jobset | {"status": {"terminalState": "Failed"}}

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        server = f"http://127.0.0.1:{self.port}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "standin",
                    "contexts": [{"name": "standin", "context": {"cluster": "standin", "user": "u"}}],
                    "clusters": [{"name": "standin", "cluster": {"server": server}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        return path


def _handler(standin: Standin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, value: dict[str, Any] | None, code: int = 200) -> None:
            body = json.dumps(value if value is not None else {"kind": "Status", "code": 404}).encode()
            self.send_response(code if value is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if match := JOBS.fullmatch(path):
                self._answer(standin.job(match[2]))
            elif match := JOBSETS.fullmatch(path):
                self._answer(standin.jobset(match[2]))
            elif PODS.fullmatch(path):
                selector = re.search(r"labelSelector=([^&]+)", query)
                found = standin.pods(selector[1].replace("%3D", "=") if selector else "")
                self._answer({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})
            else:
                self._answer(None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if JOBS.fullmatch(self.path.partition("?")[0]):
                self._answer(standin.create_job(body), 201)
            elif JOBSETS.fullmatch(self.path.partition("?")[0]):
                self._answer(standin.create_jobset(body), 201)
            else:
                self._answer(None)

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer({"kind": "Status", "status": "Success"})

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            with (standin.folder / "requests.log").open("a") as log:
                log.write(format % args + "\n")

    return Handler


@contextmanager
def serve(folder: Path, pod_environment: dict[str, str]) -> Iterator[Standin]:
    """A stand-in on a free port of 127.0.0.1; its processes end with it."""
    standin = Standin(folder, pod_environment)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(standin))
    standin.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
        for process in standin.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)
