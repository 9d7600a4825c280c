"""Plans: what they ask for, that they fit, what they refuse, and that they survive JSON."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator import CannotFit, Job, Machine, Plan, Target, UserError, hardware, plan
from estimator.engines.support import unsupported_job
from estimator.models import find
from estimator.plan import GIB, Override
from estimator.planning import planner
from estimator.planning.clusters import Survey, as_qlora, survey_places

LAPTOP = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)
CLUSTER = Target(kind="kubernetes")


def with_gpus(name: str, count: int) -> Machine:
    gpus = ((name, hardware.gpu(name).vram_bytes),) * count
    return Machine(gpus=gpus, cpu_cores=64, ram_bytes=512 * GIB, disk_free_bytes=2048 * GIB)


def job_of(model: str, **changes: Any) -> Job:
    return Job(model=find(model), **changes)


@given(
    batch=st.integers(1, 100),
    processes=st.integers(1, 64),
    micro=st.none() | st.integers(1, 8),
    multiple=st.integers(1, 12),
)
def test_a_default_batch_becomes_the_nearest_workable_one(
    batch: int, processes: int, micro: int | None, multiple: int
) -> None:
    job = Job(
        model=find("tiny-llama"), global_batch_size=batch, batch_multiple=multiple, micro_batch_size=micro
    )
    found = job.batch_over(processes)
    workable = [n for n in range(1, 7000) if n % (processes * (micro or 1)) == 0 and n % multiple == 0]
    assert found in workable
    assert abs(found - batch) == min(abs(n - batch) for n in workable)


@pytest.mark.parametrize("target", [{"nodes": 4, "gpus": 8}, {"nodes": 3}, {"gpus": 3}])
def test_a_default_batch_adapts_to_requested_machines(target: dict[str, int]) -> None:
    where = Target(kind="catalogue", gpu="A100", **target)
    with pytest.raises(UserError):
        plan(job_of("llama-8b", global_batch_size=16), where)
    chosen = plan(job_of("llama-8b", global_batch_size=16, batch_multiple=1), where)
    assert chosen.layout.global_batch_size % chosen.layout.world_size == 0
    assert any("nearest possible one to the default of 16" in line for line in chosen.why)


def test_a_default_batch_changes_only_if_no_machine_divides_it() -> None:
    usual = job_of("llama-8b", method="lora", global_batch_size=16, batch_multiple=1)
    assert plan(usual, Target(kind="catalogue")).layout.global_batch_size == 16
    large = job_of("llama-405b", engine="fsdp2", global_batch_size=16, batch_multiple=1)
    assert plan(large, Target(kind="catalogue")).layout.world_size > 16


def test_a_default_batch_changes_if_it_leaves_only_unmeasured_gpus_that_cost_more() -> None:
    job = job_of("llama-70b", engine="auto", global_batch_size=16, batch_multiple=1)
    target = Target(kind="catalogue", gpu="H100")
    fixed = plan(replace(job, batch_multiple=None), target)
    assert "H100 NVL" in fixed.request.gpu_type, "16 processes do not fit on H100 SXM"
    made = plan(job, target)
    assert made.request.gpu_type == "H100 SXM"
    assert made.layout.global_batch_size == made.layout.world_size > 16
    # Machines of better availability that cost several times as much are no reason
    rare = job_of("gpt-oss-120b", engine="auto", global_batch_size=16, batch_multiple=1)
    chosen = plan(rare, Target(kind="catalogue"))
    assert chosen.layout.global_batch_size == 16
    assert chosen.prediction.low_availability


@pytest.mark.parametrize(
    ("model", "multiple"), [("llama-8b", 1), ("llama-70b", None)], ids=["measured", "chosen batch"]
)
def test_batches_are_searched_once_unless_a_default_leaves_unmeasured_gpus(
    model: str, multiple: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def search(job: Job, *arguments: Any) -> Survey:
        searched.append(job.global_batch_size)
        return survey_places(job, *arguments)

    monkeypatch.setattr(planner, "survey_places", search)
    job = job_of(model, engine="fsdp2", global_batch_size=16, batch_multiple=multiple)
    plan(job, Target(kind="catalogue", gpu="H100"))
    assert searched == [16]


def test_batch_plans_on_aws_only() -> None:
    chosen = plan(job_of("llama-8b", method="lora"), Target(kind="batch"))
    assert chosen.request.cloud == "aws"
    with pytest.raises(UserError, match="runs on aws only"):
        plan(job_of("llama-8b", method="lora"), Target(kind="batch", cloud="gcp"))


def test_the_request_leaves_a_tenth_of_cpu_and_memory_to_the_node() -> None:
    chosen = plan(job_of("llama-8b", method="lora", global_batch_size=8), CLUSTER)
    item = hardware.instance(chosen.request.instance_type or "")
    share = chosen.request.gpus_per_node / item.gpu_count
    assert chosen.request.cpu <= (item.vcpu or 0) * share * 0.9
    assert chosen.request.memory_mib * 2**20 <= (item.ram_bytes or 0) * share * 0.9 + 2**20
    assert chosen.request.memory_mib * 2**20 >= chosen.prediction.memory.host_bytes


def test_user_choices_are_kept_in_request_and_layout() -> None:
    target = Target(kind="kubernetes", nodes=2, gpus=4, gpu="H100 SXM", cloud="gcp")
    chosen = plan(
        job_of("llama-8b", global_batch_size=32, micro_batch_size=2, activation_checkpointing=True), target
    )
    request, layout = chosen.request, chosen.layout
    assert (request.nodes, request.gpus_per_node, request.gpu_type) == (2, 4, "H100 SXM")
    assert request.cloud == "gcp"
    assert (layout.micro_batch_size, layout.accumulation, layout.activation_checkpointing) == (2, 2, True)


def test_a_partial_node_request_is_within_its_share() -> None:
    target = Target(kind="kubernetes", instance_type="p5.48xlarge", gpus=2)
    chosen = plan(job_of("llama-8b", method="lora"), target)
    assert (chosen.request.instance_type, chosen.request.gpus_per_node) == ("p5.48xlarge", 2)
    assert 2 <= chosen.request.cpu < 192 * 0.9 * 2 / 8
    part = 2048 * GIB * 0.9 * 2 / 8
    assert chosen.prediction.memory.host_bytes < chosen.request.memory_mib * 2**20 < part
    offloaded = plan(job_of("llama-8b", engine="deepspeed", offload="cpu"), replace(target, gpus=8))
    assert offloaded.request.cpu == int(192 * 0.9), "the optimizer steps there"


def test_deepspeed_uses_a_higher_zero_stage_if_a_lower_one_does_not_fit() -> None:
    job = job_of("llama-8b", engine="deepspeed", global_batch_size=8, seq_len=512)
    small = plan(job, Target(machine=with_gpus("H200 SXM", 8)))
    large = plan(replace(job, model=find("codestral")), Target(machine=with_gpus("H100 SXM", 8)))
    assert small.layout.sharding == "zero1"
    assert large.layout.sharding == "zero3"
    assert (small.layout.precision, large.layout.precision) == ("bf16-mixed", "bf16-mixed")


# This machine


def test_a_small_model_runs_on_the_cpu_in_fp32() -> None:
    chosen = plan(job_of("tiny-llama", seq_len=512), Target(machine=LAPTOP))
    assert (chosen.layout.device, chosen.layout.precision, chosen.request.gpus_per_node) == ("cpu", "fp32", 0)
    assert (chosen.layout.sharding, chosen.layout.micro_batch_size) == ("none", 8)
    assert chosen.prediction.tokens_per_second is None
    assert chosen.prediction.usd is None


@pytest.mark.parametrize(("engine", "sharding"), [("torchtune", "fsdp"), ("deepspeed", "zero1")])
def test_two_local_nodes_share_the_batch_and_the_memory(engine: Any, sharding: str) -> None:
    chosen = plan(job_of("tiny-llama", engine=engine, seq_len=512), Target(machine=LAPTOP, nodes=2))
    assert (chosen.layout.nodes, chosen.layout.world_size, chosen.layout.micro_batch_size) == (2, 2, 4)
    assert (chosen.layout.sharding, chosen.prediction.memory.capacity_bytes) == (
        sharding,
        LAPTOP.ram_bytes // 2,
    )


def test_a_large_model_is_planned_on_cpus_only_if_requested() -> None:
    job = job_of("llama-8b", method="lora")
    with pytest.raises(CannotFit) as caught:
        plan(job, Target(machine=LAPTOP))
    error = caught.value
    assert "8.0 billion" in error.problem
    assert "no GPU" in error.available
    assert error.suggestions == ({"with": "kubernetes"}, {"with": "batch"})
    assert error.example_plan.prediction.memory.fits
    big = replace(LAPTOP, ram_bytes=512 * GIB)
    assert plan(job, Target(machine=big, device="cpu")).layout.device == "cpu"


def test_requested_cpus_are_refused_only_for_lack_of_memory() -> None:
    refusal = r"does not fit in the available memory: 4 processes: needs \S+ GiB, has 4.00 GiB"
    with pytest.raises(CannotFit, match=refusal):
        plan(job_of("llama-8b"), Target(machine=LAPTOP, device="cpu", gpus=4))


def test_changes_with_which_a_job_fits_here_are_suggested_before_clusters() -> None:
    with pytest.raises(CannotFit) as caught:
        plan(job_of("codestral", method="lora", engine="fsdp2"), Target(machine=with_gpus("NVIDIA L4", 1)))
    suggestions = caught.value.suggestions
    assert suggestions.index({"method": "qlora"}) < suggestions.index({"with": "kubernetes"})


@pytest.mark.parametrize("engine", ["torchtune", "deepspeed", "fsdp2"])
def test_qlora_is_suggested_on_the_requested_engine(engine: str) -> None:
    job = job_of("codestral", method="lora", engine=engine)
    with pytest.raises(CannotFit) as caught:
        plan(job, Target(machine=with_gpus("NVIDIA L4", 1)))
    assert {"method": "qlora"} in caught.value.suggestions


def test_qlora_is_suggested_on_another_engine_if_the_requested_one_cannot_quantize() -> None:
    quantized = as_qlora(job_of("smollm2-135m", method="lora", engine="torchtune"))
    assert (quantized.method, quantized.engine) == ("qlora", "deepspeed")


def test_all_local_gpus_that_divide_the_batch_are_used() -> None:
    machine = with_gpus("NVIDIA H100 80GB HBM3", 8)
    assert plan(job_of("llama-8b", global_batch_size=16), Target(machine=machine)).layout.world_size == 8
    six = plan(job_of("llama-8b", global_batch_size=6), Target(machine=machine))
    assert six.layout.world_size == 6
    assert any("6 of 8 GPUs" in line for line in six.why)


def test_a_gpu_missing_from_the_table_gets_a_plan_without_speed() -> None:
    machine = Machine(
        gpus=(("NVIDIA X1000", 80 * GIB),), cpu_cores=8, ram_bytes=64 * GIB, disk_free_bytes=GIB
    )
    chosen = plan(job_of("llama-8b", method="lora"), Target(machine=machine))
    assert (chosen.request.gpu_type, chosen.prediction.tokens_per_second) == ("NVIDIA X1000", None)


@pytest.mark.parametrize(
    ("options", "engine", "precision"),
    [
        ({}, "fsdp2", "fp16-mixed"),
        ({"liger": True}, "fsdp2", "fp32"),
        ({"engine": "torchtune"}, "torchtune", "fp32"),
        ({"model": "gemma-2b"}, "fsdp2", "fp32"),
    ],
    ids=["auto", "liger", "torchtune", "gemma"],
)
def test_a_gpu_without_bf16_uses_fp16_for_tested_families_else_fp32(
    options: dict[str, Any], engine: str, precision: str
) -> None:
    job = job_of(**{"model": "llama-3.2-1b", "method": "lora", "engine": "auto", "seq_len": 512} | options)
    chosen = plan(job, Target(machine=with_gpus("Tesla T4", 1)))
    assert (chosen.engine, chosen.layout.precision, chosen.liger) == (engine, precision, "liger" in options)


def test_fp16_is_refused_for_unsupported_engines_and_options() -> None:
    for options, reason in (({"engine": "deepspeed"}, "only fsdp2"), ({"liger": True}, "fp16-mixed scales")):
        job = job_of("llama-8b", **{"engine": "fsdp2", "precision": "fp16-mixed"} | options)
        assert reason in str(unsupported_job(job))


# Refused


@pytest.mark.parametrize(
    ("job", "target", "words"),
    [
        (
            {"global_batch_size": 10},
            {"nodes": 2, "gpus": 2},
            "batch of 10 is not divisible over 2 nodes of 2",
        ),
        ({"global_batch_size": 8, "micro_batch_size": 4}, {"nodes": 4}, "with micro batch 4"),
        ({"global_batch_size": 8}, {"machine": None, "kind": "catalogue", "gpus": 3}, "over 1 node of 3"),
    ],
)
def test_an_indivisible_batch_is_refused_with_the_nearest_divisible_one(
    job: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(job_of("tiny-llama", **job), Target(**{"machine": LAPTOP, **target}))
    assert words in caught.value.problem
    assert "Nearest possible batch" in caught.value.advice


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"gpu": "H300"}, "no GPU 'H300'"),
        ({"instance_type": "p9.xlarge"}, "no instance type 'p9.xlarge'"),
        ({"cloud": "mars"}, "no cloud 'mars'"),
        ({"gpu": "H100 SXM", "cloud": "lambda"}, "--cloud lambda and --gpu 'H100 SXM'"),
        ({"gpus": 32}, "--gpus 32"),
        ({"gpu": "MI300X"}, "--gpu MI300X"),
        ({"device": "cpu", "gpu": "L4"}, "--device cpu and --gpu L4 contradict"),
    ],
)
def test_an_unknown_gpu_machine_or_cloud_is_a_one_line_error(target: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(job_of("llama-8b", global_batch_size=32), Target(kind="kubernetes", **target))
    assert words in caught.value.problem
    assert not isinstance(caught.value, CannotFit)


@pytest.mark.parametrize("kind", ["kubernetes", "batch"])
def test_a_small_model_can_be_planned_for_a_clusters_cpus(kind: Any) -> None:
    chosen = plan(job_of("tiny-llama"), Target(kind=kind, device="cpu", nodes=2))
    asked = chosen.request
    assert (chosen.layout.device, asked.nodes, asked.gpus_per_node, asked.gpu_type) == ("cpu", 2, 0, None)
    assert asked.cpu == 4
    # The ranks are not alone in the container: with a limit of theirs alone it is killed for memory.
    assert chosen.prediction.memory.host_bytes / 2**20 + 1024 <= asked.memory_mib <= 16 * 1024
    assert asked.instance_type is None
    assert chosen.prediction.usd_per_hour is None


def test_a_model_too_large_for_cluster_cpus_is_planned_for_gpus() -> None:
    with pytest.raises(CannotFit) as caught:
        plan(job_of("llama-8b"), Target(kind="kubernetes", device="cpu"))
    assert "does not fit" in caught.value.problem
    assert "Remove --device" in caught.value.advice


def test_more_gpus_than_a_machine_has_are_refused() -> None:
    machine = with_gpus("NVIDIA L4", 2)
    with pytest.raises(UserError, match="this machine has 2"):
        plan(job_of("tiny-llama"), Target(machine=machine, gpus=4))
    with pytest.raises(UserError, match="--device cuda"):
        plan(job_of("tiny-llama"), Target(machine=LAPTOP, device="cuda"))


def test_cannot_fit_survives_pickling() -> None:
    batch = {"with": "batch"}
    error = CannotFit("does not fit", "do", suggestions=(batch,), available="a laptop")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (copy.problem, copy.suggestions, copy.available) == ("does not fit", (batch,), "a laptop")
    assert (str(copy), copy.advice) == (str(error), error.advice)


# Properties


@given(
    st.sampled_from(["tiny-llama", "llama-3.2-3b", "llama-8b"]),
    st.sampled_from(["full", "lora"]),
    st.sampled_from(["torchtune", "deepspeed"]),
    st.integers(1, 64),
    st.integers(1, 2048),
)
@settings(max_examples=40, deadline=None)
def test_every_plan_fits_has_the_requested_batch_and_survives_json(
    model: str, method: Any, engine: Any, batch: int, seq_len: int
) -> None:
    job = job_of(model, method=method, engine=engine, global_batch_size=batch, seq_len=seq_len)
    chosen = plan(job, CLUSTER)
    assert chosen.layout.global_batch_size == batch
    assert chosen.prediction.memory.fits
    override = Override(name="gpus", planned="1", used="2", given_by="--gpus")
    noted = chosen.with_override(override, gpus_per_node=2)
    assert (Plan.from_json(chosen.to_json()), Plan.from_json(noted.to_json())) == (chosen, noted)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("full", Target(kind="catalogue", gpu="RTX 4090", gpus=1, nodes=1)),
        ("auto", Target(kind="catalogue", gpu="RTX A4000", gpus=1, nodes=1)),
    ],
)
def test_the_example_of_a_job_that_does_not_fit_is_the_plan_of_its_first_suggestion(
    method: str, target: Target
) -> None:
    job = Job(model=find("qwen2.5-32b"), method=method, engine="auto", global_batch_size=16)  # type: ignore[arg-type]
    with pytest.raises(CannotFit) as caught:
        plan(job, target)
    example, first = caught.value.example_plan, caught.value.suggestions[0]
    assert first == {
        "resources.nodes": example.request.nodes,
        "resources.instance_type": example.request.instance_type,
    }
    followed = replace(
        Target(kind="catalogue"), nodes=example.request.nodes, instance_type=example.request.instance_type
    )
    assert example == plan(job, followed)
