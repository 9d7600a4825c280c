"""``run --with kubernetes --model llama-70b``, through Metaflow's real client, as far as the JobSet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import kubernetes_validate
import pytest

from estimator.plan import Plan
from launchers import tiny_llama
from tests.flows.conftest import FLOW, environment
from tests.kubernetes import standin

pytestmark = [pytest.mark.slow, pytest.mark.lab]

# What a cluster that has trained this model before has in its datastore (the weights aside).
KEEP_MODEL = """
import sys
from pathlib import Path
from decorators import _metaflow
from decorators.storage import MetaflowStorage
from launchers.bundles import put_bundle
store = MetaflowStorage(_metaflow.configured_storage(), "finetune-cache")
put_bundle(store, sys.argv[1], Path(sys.argv[2]))
"""
READ_PLAN = """
import sys
from metaflow import Run, namespace
namespace(None)
print(Run(sys.argv[1])["prepare"].task["plan"].data.to_json())
"""


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An S3 server on this machine, and the environment that makes it Metaflow's datastore."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.2)
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket="metaflow-test")
        yield {
            **keys,
            "AWS_EC2_METADATA_DISABLED": "true",
            "METAFLOW_S3_ENDPOINT_URL": url,
            "METAFLOW_DATASTORE_SYSROOT_S3": "s3://metaflow-test/metaflow",
            "METAFLOW_DATATOOLS_S3ROOT": "s3://metaflow-test/data",
            "METAFLOW_DEFAULT_DATASTORE": "s3",
        }
    finally:
        server.terminate()
        server.wait(10)


def seventy_billion(folder: Path) -> Path:
    """A model folder with tiny-llama's tokenizer and weights: enough for all that comes before training."""
    return tiny_llama.make(folder)


def test_the_jobset_of_llama_70b_asks_for_what_was_planned(
    tmp_path: Path, dataset: Path, s3: dict[str, str]
) -> None:
    bin_folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([bin_folder, os.environ["PATH"]])
    pod_environment = {key: value for key, value in s3.items() if key.startswith("AWS_")} | {
        "PATH": path,
        "HOME": str(tmp_path),
        "METAFLOW_SKIP_INSTALL_DEPENDENCIES": "1",
        "HF_HUB_OFFLINE": "1",
        "FINETUNE_WORK_DIR": str(tmp_path / "work"),
    }
    pods = tmp_path / "pods"
    pods.mkdir()
    with standin.serve(pods, pod_environment) as cluster:
        own = environment(
            tmp_path,
            KUBECONFIG=str(cluster.kubeconfig()),
            METAFLOW_KUBERNETES_CONTAINER_IMAGE="registry.example/finetune:1",
            METAFLOW_KUBERNETES_NAMESPACE="default",
            HF_TOKEN="hf_secret_of_the_test",
        )
        own |= s3 | {"PATH": path}
        keep = [sys.executable, "-c", KEEP_MODEL, "weights/meta-llama--Llama-3.1-70B"]
        subprocess.run([*keep, str(seventy_billion(tmp_path / "m"))], env=own, check=True, timeout=120)
        arguments = ["run", "--with", "kubernetes", "--model", "llama-70b"]
        arguments += ["--gpu", "H100", "--dataset", str(dataset), "--no-preflight"]
        run = subprocess.run(
            [sys.executable, str(FLOW), *arguments, "--run-id-file", "run_id"],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            timeout=400,
        )
        logs = "\n".join(log.read_text() for log in pods.glob("*/log"))
        # The code package brings our packages whole, data files too: an image need not have them.
        assert list(pods.glob("*/metaflow/.mf_code/estimator/data/gpus.csv"))
        assert list(pods.glob("*/metaflow/.mf_code/launchers/settings.schema.json"))
        assert cluster.jobsets, run.stdout + run.stderr + logs
        run_id = (tmp_path / "run_id").read_text()
        read = subprocess.run(
            [sys.executable, "-c", READ_PLAN, f"FinetuneFlow/{run_id}"],
            env=own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        jobset = next(iter(cluster.jobsets.values()))
        manifests = [*cluster.jobs.values(), *cluster.jobsets.values()]
    plan = Plan.from_json(read.stdout)
    check_jobset(jobset, plan)
    check_preparing_job(list(cluster.jobs.values())[1], plan)
    for manifest in manifests:
        assert "hf_secret_of_the_test" not in str(manifest)
    assert "hf_secret_of_the_test" not in run.stdout + run.stderr + logs


def check_jobset(jobset: dict[str, Any], plan: Plan) -> None:
    asked, jobs = plan.request, {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    assert asked.nodes > 1
    assert jobs["control"]["replicas"] + jobs["worker"]["replicas"] == asked.nodes
    for job in jobs.values():
        pod = job["template"]["spec"]["template"]["spec"]
        container = pod["containers"][0]
        requests = container["resources"]["requests"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == asked.gpus_per_node == 8
        assert float(requests["cpu"]) == asked.cpu
        memory_mb = float(requests["memory"].removesuffix("M"))
        assert memory_mb == pytest.approx(asked.memory_mib * 2**20 / 1e6, abs=1)
        assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == asked.instance_type
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        shared = next(v for v in volumes.values() if v.get("emptyDir", {}).get("medium") == "Memory")
        assert shared["emptyDir"]["sizeLimit"] == f"{asked.shared_memory_mib}Mi"
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}, "1.32", strict=True
        )


def check_preparing_job(job: dict[str, Any], plan: Plan) -> None:
    """The weights must fit on the disk of the pod that fetches them, which needs no GPU."""
    resources = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    disk_mb = float(resources["requests"]["ephemeral-storage"].removesuffix("M"))
    assert disk_mb >= plan.request.disk_mib * 2**20 / 1e6
    assert "nvidia.com/gpu" not in str(resources)
