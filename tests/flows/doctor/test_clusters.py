"""Kubernetes, Batch and Slurm: unreachable, broken or slow; missing parts are named with a fix."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from tests.estimator.hardware.cluster.test_machines import Api, serving_api, write_kubeconfig
from tests.flows.doctor.conftest import QueryProbe

KUBERNETES = ("kubernetes", "kubernetes, several nodes", "argo-workflows")


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    return tmp_path / ".kube" / "config"


def test_every_kubernetes_backend_reports_a_missing_kubeconfig(
    query_probe: QueryProbe, kubeconfig: Path
) -> None:
    lines = query_probe("kubernetes", KUBECONFIG=str(kubeconfig))
    assert tuple(lines) == tuple(reversed(KUBERNETES))
    assert lines["kubernetes"].found == f"There is no kubeconfig at {kubeconfig}."
    assert "KUBECONFIG" in lines["kubernetes"].fix
    assert all(line.state == "no" for line in lines.values())


def test_a_broken_kubeconfig_or_closed_port_is_reported_in_one_line_without_credentials(
    query_probe: QueryProbe, tmp_path: Path, kubeconfig: Path
) -> None:
    write_kubeconfig(tmp_path, training="http://127.0.0.1:9")
    closed = query_probe("kubernetes", KUBECONFIG=str(kubeconfig))["kubernetes"]
    kubeconfig.write_text("users: [{name: u, user: {token: own-secret-token")
    broken = query_probe("kubernetes", KUBECONFIG=str(kubeconfig))["kubernetes"]
    assert (closed.state, broken.state) == ("no", "no")
    assert "(http://127.0.0.1:9) cannot be reached" in closed.found
    assert "cannot be used" in broken.found
    assert "own-secret-token" not in f"{broken}"


@pytest.mark.slow
def test_a_server_that_never_answers_is_abandoned_before_the_probe_times_out(
    query_probe: QueryProbe, tmp_path: Path, kubeconfig: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_kubeconfig(tmp_path, training=f"https://127.0.0.1:{silent.getsockname()[1]}")
        line = query_probe("kubernetes", 120, KUBECONFIG=str(kubeconfig))["kubernetes"]
    assert line.state == "no"
    assert "cannot be reached" in line.found


@pytest.mark.slow
def test_a_hanging_login_command_is_ended_with_its_child_processes(
    query_probe: QueryProbe, tmp_path: Path, kubeconfig: Path
) -> None:
    write_kubeconfig(tmp_path, training="https://127.0.0.1:9")
    config = json.loads(kubeconfig.read_text())
    program = tmp_path / "login"
    program.write_text("#!/bin/sh\nsetsid sleep 86399 &\nsleep 86399\n")
    program.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    login = {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}
    config["users"] = [{"name": "u", "user": {"exec": login}}]
    kubeconfig.write_text(json.dumps(config))
    line = query_probe("kubernetes", 6, KUBECONFIG=str(kubeconfig))["kubernetes"]
    assert (line.state, line.found) == ("unknown", "no result within 6 s")
    leftover = [
        each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "86399"]
    ]
    assert leftover == []


class Cluster(Api):
    """A cluster with the namespace and the given objects by path."""

    objects: dict[str, dict[str, object]]

    def answer(self, path: str) -> dict[str, object] | None:
        return self.objects.get(path) or super().answer(path)


BARE = {"/apis": {"kind": "APIGroupList"}, "/api/v1/namespaces/default": {"kind": "Namespace"}}
JOBSET = {"/apis/jobset.x-k8s.io/v1alpha2": {"resources": [{"name": "jobsets"}]}}
ARGO = {"/apis/argoproj.io/v1alpha1": {"resources": [{"name": "workflowtemplates"}]}}
REMOTE = {
    "METAFLOW_DEFAULT_DATASTORE": "s3",
    "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow",
    "METAFLOW_KUBERNETES_CONTAINER_IMAGE": "127.0.0.1:9/finetune:1",
}


@pytest.mark.parametrize(
    ("objects", "able"),
    [
        ({}, (False, False, False)),
        ({**BARE, **JOBSET}, (True, True, False)),
        ({**BARE, **JOBSET, **ARGO}, (True, True, True)),
    ],
    ids=["nothing", "JobSet", "Argo"],
)
def test_missing_components_of_a_cluster_decide_which_backends_work(
    objects: dict[str, dict[str, object]],
    able: tuple[bool, ...],
    query_probe: QueryProbe,
    tmp_path: Path,
    kubeconfig: Path,
) -> None:
    cluster = Cluster()
    cluster.objects = {"/apis": BARE["/apis"], **objects}
    with serving_api(cluster) as url:
        write_kubeconfig(tmp_path, training=url)
        lines = query_probe("kubernetes", KUBECONFIG=str(kubeconfig), **REMOTE)
    assert tuple(lines[name].state == "ok" for name in KUBERNETES) == able, lines
    assert all(line.fix for line in lines.values() if line.state == "no")


def test_a_usable_cluster_is_not_reported_as_working_with_a_local_datastore(
    query_probe: QueryProbe, tmp_path: Path, kubeconfig: Path
) -> None:
    cluster = Cluster()
    cluster.objects = {**BARE, **JOBSET, **ARGO}
    with serving_api(cluster) as url:
        write_kubeconfig(tmp_path, training=url)
        lines = query_probe("kubernetes", KUBECONFIG=str(kubeconfig))
    for name in KUBERNETES:
        assert lines[name].state == "no"
        assert "the datastore is local" in lines[name].found
        assert "metaflow configure" in lines[name].fix


def test_batch_without_credentials_is_reported_with_how_to_log_in(query_probe: QueryProbe) -> None:
    lines = query_probe("batch", AWS_DEFAULT_REGION="us-east-1")
    assert lines["batch"].found == "There are no AWS credentials."
    assert lines.keys() == {"batch", "batch, several nodes", "step-functions"}
    assert "aws configure" in lines["batch"].fix


def test_an_unreachable_batch_endpoint_is_reported_in_one_line(query_probe: QueryProbe) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIDOCTOR", "AWS_SECRET_ACCESS_KEY": "secret-of-doctor"}
    endpoint = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    line = query_probe("batch", **keys, **endpoint)["batch"]
    assert line.state == "no"
    assert line.found.startswith("AWS Batch cannot be reached")


@pytest.mark.slow
def test_a_missing_slurm_and_a_silent_slurm_controller_are_reported(
    query_probe: QueryProbe, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    absent = query_probe("slurm", PATH=str(programs))["slurm"]
    assert (absent.state, absent.found) == ("no", "srun and scontrol are not on PATH")
    for name in ("srun", "scontrol"):
        (programs / name).write_text("#!/bin/sh\nexec /bin/sleep 600\n")
        (programs / name).chmod(0o755)
    silent = query_probe("slurm", PATH=os.pathsep.join([str(programs), os.environ["PATH"]]))["slurm"]
    assert (silent.state, silent.found) == ("no", "the controller did not respond within 5 s")
