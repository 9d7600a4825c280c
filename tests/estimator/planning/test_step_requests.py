"""Each step's own request: the disk of prepare, the GPUs of evaluate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import Job, Machine, Target, hardware
from estimator.models import find
from estimator.plan import GIB
from estimator.planning.planner import plan
from estimator.planning.step_requests import CPU_OF_A_GPU, CPU_OUTSIDE_RANKS, DATA_BYTES

CLUSTER = Target(kind="kubernetes")


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_step_requests_cores_for_each_gpu_and_for_the_processes_outside_of_ranks(gpus: int) -> None:
    job = Job(model=find("llama-8b"), method="qlora", engine="fsdp2", global_batch_size=16)
    made = plan(job, Target(kind="catalogue", gpu="RTX 4090", gpus=gpus, nodes=1))
    assert made.request.cpu == CPU_OF_A_GPU * gpus + CPU_OUTSIDE_RANKS


@pytest.mark.parametrize(("model", "nodes"), [("llama-8b", 1), ("llama-70b", 2)])
def test_prepare_requests_disk_for_weights_and_data_only(model: str, nodes: int) -> None:
    job = Job(model=find(model), global_batch_size=64)
    chosen = plan(job, replace(CLUSTER, gpu="H100 SXM", nodes=nodes))
    prepare = chosen.prepare
    assert prepare.disk_mib * 2**20 == pytest.approx(2 * job.model.parameters + DATA_BYTES, abs=2**20)
    assert prepare.disk_mib < chosen.request.disk_mib / 3
    assert (prepare.nodes, prepare.gpus_per_node) == (1, 0)
    assert (prepare.gpu_type, prepare.instance_type) == (None, None)
    assert prepare.cpu <= 4
    assert prepare.memory_mib <= 16 * 1024


def test_the_disk_request_of_a_pod_excludes_uploaded_checkpoints() -> None:
    """Its part of one being written and of one being sent, and the whole of the one that it resumes."""
    job = Job(model=find("llama-70b"), global_batch_size=16, keep_checkpoints=2)
    chosen = plan(job, replace(CLUSTER, gpu="H100 SXM", nodes=2, cloud="aws"))
    parameters = job.model.parameters
    checkpoint = 6 * parameters  # weights and both moments, in bf16
    assert chosen.request.disk_mib * 2**20 == pytest.approx(4 * parameters + 2 * checkpoint, rel=0.02)
    more = plan(replace(job, keep_checkpoints=9), replace(CLUSTER, gpu="H100 SXM", nodes=2, cloud="aws"))
    assert more.request.disk_mib == chosen.request.disk_mib


@pytest.mark.parametrize(
    ("model", "method", "gpu", "gpus", "nodes"),
    [
        ("llama-8b", "full", "H100 SXM", 1, 1),
        ("llama-70b", "full", "H100 SXM", 2, 2),
        ("llama-70b", "lora", "A100 SXM 40GB", 5, 1),
        ("mixtral-8x7b", "full", "A100 SXM 80GB", 2, 2),
    ],
)
def test_evaluate_requests_the_fewest_gpus_of_one_node_that_hold_the_model(
    model: str, method: str, gpu: str, gpus: int, nodes: int
) -> None:
    job = Job(model=find(model), method=method, engine="auto", global_batch_size=64)  # type: ignore[arg-type]
    chosen = plan(job, replace(CLUSTER, gpu=gpu, nodes=nodes, cloud="aws"))
    evaluate = chosen.evaluate
    assert (evaluate.nodes, evaluate.gpus_per_node, evaluate.gpu_type) == (1, gpus, gpu)
    held = gpus * (chosen.prediction.memory.capacity_bytes or 0)
    assert 2 * job.model.parameters < held
    assert 2 * job.model.parameters > held * (gpus - 1) / gpus * 0.7  # one GPU fewer would be tight
    share = gpus / chosen.request.gpus_per_node
    assert evaluate.cpu <= chosen.request.cpu * share + 2
    item = hardware.instance(chosen.request.instance_type or "")
    assert evaluate.memory_mib * 2**20 <= (item.ram_bytes or 0) * gpus / item.gpu_count
    assert evaluate.disk_mib * 2**20 > 4 * job.model.parameters


def test_local_plans_have_no_step_requests_and_no_start_up() -> None:
    machine = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=GIB)
    chosen = plan(Job(model=find("tiny-llama"), seq_len=512), Target(machine=machine))
    assert chosen.prepare is chosen.evaluate is chosen.prediction.start_up is None


def test_on_cluster_cpus_evaluate_requests_one_training_node() -> None:
    chosen = plan(Job(model=find("tiny-llama"), seq_len=512), replace(CLUSTER, device="cpu", nodes=2))
    assert chosen.evaluate.nodes == 1
    assert (chosen.evaluate.cpu, chosen.evaluate.memory_mib) == (
        chosen.request.cpu,
        chosen.request.memory_mib,
    )
