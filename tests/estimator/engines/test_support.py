"""Which engine trains what: the one rule by which plans choose engines and runs refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator import CannotFit, Job, Target, UserError, hardware
from estimator.engines.support import unsupported_job, unsupported_shards, with_simplest_engine
from estimator.job import Machine
from estimator.models import find, names
from estimator.planning.planner import plan, plans
from estimator.setup import LlamaAdapter, Setup

ANY = Target(kind="catalogue")


def test_engine_auto_is_the_first_engine_that_supports_model_and_method() -> None:
    for name in names():
        job = Job(model=find(name), engine="auto", seq_len=min(512, find(name).max_seq_len), lora_targets=())
        chosen = with_simplest_engine(job)
        other = replace(job, engine="deepspeed")
        if chosen.engine == "deepspeed":
            assert unsupported_job(replace(job, engine="torchtune")) is not None
            assert unsupported_job(other) is None
        elif unsupported_job(chosen) is not None:
            assert unsupported_job(other) is not None


@pytest.mark.parametrize(
    ("model", "fields", "engine"),
    [
        ("llama-8b", {}, "torchtune"),
        ("llama-8b", {"method": "qlora"}, "torchtune"),
        ("qwen3-8b", {"method": "qlora"}, "deepspeed"),
        ("llama-8b", {"method": "qlora", "quantization": "int8"}, "deepspeed"),
        ("llama-8b", {"method": "qlora", "fsdp_sharding": "full"}, "fsdp2"),
        ("mixtral-8x7b", {}, "deepspeed"),
        ("mixtral-8x7b", {"method": "lora"}, "deepspeed"),
        ("qwen3-8b", {}, "deepspeed"),
        ("llama-8b", {"zero_stage": 2}, "deepspeed"),
        ("llama-8b", {"offload": "cpu"}, "deepspeed"),
        ("llama-8b", {"precision": "bf16-mixed"}, "deepspeed"),
        ("llama-8b", {"compile": True}, "torchtune"),
        ("llama-8b", {"method": "dora"}, "deepspeed"),
        ("llama-8b", {"method": "adapter-v2"}, "deepspeed"),
        ("llama-8b", {"method": "lora", "rslora": True}, "deepspeed"),
        ("llama-8b", {"fp8": "tensorwise"}, "fsdp2"),
        ("qwen3-8b", {"compile": True}, "deepspeed"),
        ("llama-8b", {"recompute": "selective"}, "deepspeed"),
        ("llama-8b", {"recompute_every": 2}, "deepspeed"),
        ("llama-8b", {"rslora": True}, "torchtune"),  # no adapters, nothing to scale
    ],
)
def test_requested_options_determine_the_simplest_engine(
    model: str, fields: dict[str, Any], engine: str
) -> None:
    job = Job(model=find(model), engine="auto", global_batch_size=16, **fields)
    assert with_simplest_engine(job).engine == engine


def test_every_family_and_method_has_a_plan_with_a_reason_if_no_engine_trains_it() -> None:
    for name in {find(name).family: name for name in names()}.values():
        model = find(name)
        if model.parameters > 100e9 or not model.projections:
            continue  # no machine of one kind in so small a number holds it
        for method in ("full", "lora"):
            job = Job(
                model=model,
                method=method,  # type: ignore[arg-type]
                engine="auto",
                seq_len=min(512, model.max_seq_len),
                global_batch_size=64,
                lora_targets=tuple(model.projections),
            )
            made = plan(job, replace(ANY, gpu="H100 SXM", nodes=4, gpus=8))
            only = unsupported_job(replace(job, engine=made.engine))  # type: ignore[arg-type]
            assert any("planned only" in line for line in made.why) == (only is not None), name


def test_method_auto_skips_methods_that_no_engine_supports() -> None:
    job = Job(model=find("mixtral-8x7b"), method="auto", engine="auto", global_batch_size=16)
    ranked = plans(job, replace(ANY, gpu="A100 SXM 80GB", nodes=1, gpus=4))
    assert (ranked.best.method, ranked.best.engine) == ("lora", "fsdp2")


@pytest.mark.parametrize(("fields", "named"), [({"method": "dora"}, "dora"), ({"rslora": True}, "rslora")])
def test_torchtune_refuses_adapters_that_cannot_be_merged(fields: dict[str, Any], named: str) -> None:
    job = Job(model=find("llama-8b"), **({"method": "lora", "engine": "torchtune"} | fields))
    assert named in (unsupported_job(job) or "")
    assert "planned only" in plan(job, ANY).why[-1]
    assert unsupported_job(replace(job, engine="deepspeed")) is None


def test_adapters_on_experts_only_are_refused() -> None:
    job = Job(model=find("mixtral-8x7b"), method="lora", engine="deepspeed", lora_targets=("up_proj",))
    assert "experts only" in (unsupported_job(job) or "")
    assert unsupported_job(replace(job, lora_targets=("up_proj", "q_proj"))) is None


def test_adapters_on_experts_need_fsdp2_and_are_not_merged() -> None:
    job = Job(model=find("mixtral-8x7b"), method="lora", engine="fsdp2", lora_experts=True)
    assert unsupported_job(job) is None
    assert with_simplest_engine(replace(job, engine="auto")).engine == "fsdp2"
    refused: dict[str, dict[str, Any]] = {
        "ZeRO-3": {"engine": "deepspeed"},
        "torchtune": {"engine": "torchtune", "model": find("llama-8b")},
        "only LoRA adapters": {"method": "dora"},
        "has no experts": {"model": find("llama-8b")},
        "compile": {"compile": True},
        "task reward": {"task": "reward"},
        "new_tokens": {"new_tokens": 2},
    }
    for named, fields in refused.items():
        assert (named if named != "torchtune" else "no experts") in (
            unsupported_job(replace(job, **fields)) or ""
        )
    assert unsupported_job(replace(job, method="full")) is None, "full training has them anyway"


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
@pytest.mark.parametrize(
    ("model", "method", "named"),
    [
        ("llama-8b", "adapter-v1", None),
        ("qwen3-8b", "adapter-v1", "is qwen3"),
        ("mixtral-8x7b", "adapter-v1", "is mixtral"),
        ("mixtral-8x7b", "adapter-v2", "is mixtral"),
        ("mistral-nemo-12b", "adapter-v1", "32 * 128 and 5120"),
        ("mistral-nemo-12b", "adapter-v2", None),
    ],
)
def test_llama_adapters_are_refused_for_families_without_modules_for_them(
    engine: Any, model: str, method: Any, named: str | None
) -> None:
    clause = unsupported_job(Job(model=find(model), method=method, engine=engine))
    assert (clause is None) == (named is None)
    assert (named or "") in (clause or "")
    assert "LLaMA-Adapter" in (unsupported_job(Job(model=find("llama-8b"), method=method)) or "")


@pytest.mark.parametrize("fields", [{"compile": True}, {"fp8": "rowwise"}])
def test_llama_adapters_are_neither_compiled_nor_computed_in_float8(fields: dict[str, Any]) -> None:
    job = Job(model=find("llama-8b"), method="adapter-v2", engine="fsdp2", **fields)
    assert "LLaMA-Adapters" in (unsupported_job(job) or "")


def test_a_bias_that_peft_would_add_twice_is_refused() -> None:
    biased = replace(find("llama-8b"), qkv_bias=True, o_bias=True)
    assert "twice" in (unsupported_job(Job(model=biased, method="adapter-v1", engine="fsdp2")) or "")
    assert unsupported_job(Job(model=biased, method="adapter-v2", engine="fsdp2")) is None


def test_a_start_layer_beyond_the_last_block_is_refused_with_valid_values() -> None:
    with pytest.raises(UserError, match=r"adapter-start-layer 32: llama-8b has 32 blocks") as caught:
        Job(model=find("llama-8b"), method="adapter-v2", llama_adapter=LlamaAdapter(start_layer=32))
    assert "--adapter-start-layer 0" in caught.value.advice


def test_dora_has_a_magnitude_for_each_output() -> None:
    setup = Setup(model=find("llama-8b"), engine="deepspeed", method="lora")
    outputs = sum(out for out, _ in setup.model.linear_shapes.values())
    magnitudes = replace(setup, method="dora").adapter_parameters - setup.adapter_parameters
    assert magnitudes == setup.model.layers * outputs


def test_quantized_weights_are_not_sharded_over_processes_that_do_not_divide_them() -> None:
    job = Job(model=find("llama-8b"), method="qlora", global_batch_size=48)
    reason = unsupported_shards(job.model, 3)
    assert reason is not None
    for made in plans(job, ANY, top=50).plans:
        assert unsupported_shards(job.model, made.layout.world_size) is None
    with pytest.raises(UserError) as caught:
        plan(job, replace(ANY, nodes=3, gpus=1))
    assert caught.value.problem == f"{reason}."


def test_an_optimizer_in_the_backward_pass_needs_torchtune_without_accumulation() -> None:
    job = Job(model=find("llama-3.2-3b"), optimizer_in_backward=True, global_batch_size=4, seq_len=512)
    best = plan(job, replace(ANY, gpu="A100 SXM 80GB", nodes=1, gpus=1))
    assert (best.engine, best.layout.accumulation, best.planned_only) == ("torchtune", 1, None)
    with pytest.raises(UserError, match="not supported by engine deepspeed"):
        replace(job, engine="deepspeed")
    assert "recipes of lora" in (unsupported_job(replace(job, engine="torchtune", method="lora")) or "")


def test_torchtune_supports_bitsandbytes_optimizers_in_one_process_only() -> None:
    job = Job(model=find("llama-3.2-3b"), optimizer="paged-adamw8bit", optimizer_in_backward=True)
    assert {each.layout.world_size for each in plans(job, ANY, top=20).plans} == {1}
    with pytest.raises(UserError, match="sharded by FSDP2"):
        plan(job, replace(ANY, nodes=2, gpus=1))
    after = replace(job, engine="torchtune", optimizer_in_backward=False)
    assert "needs optimizer.in_backward" in (unsupported_job(after) or "")


@pytest.mark.parametrize(
    "choice", [{"fp8": "msamp-o2"}, {"fp8": "te"}, {"fp8": "mxfp8"}, {"optimizer": "adamw4bit"}], ids=str
)
def test_a_job_refuses_recipes_and_optimizers_that_no_engine_supports(choice: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not known"):
        Job(model=find("llama-8b"), **choice)


def test_the_float8_reason_excludes_experts() -> None:
    job = Job(model=find("mixtral-8x7b"), engine="fsdp2", fp8="tensorwise")
    assert "experts" in (unsupported_job(job) or "")


@pytest.mark.parametrize(("gpu", "recipe"), [("A100 SXM 80GB", "tensorwise"), ("L40S", "rowwise")])
def test_a_gpu_without_the_float8_recipe_is_refused_before_the_search(gpu: str, recipe: str) -> None:
    job = Job(model=find("llama-3.2-1b"), engine="fsdp2", fp8=recipe)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="compute capability"):
        plan(job, replace(ANY, gpu=gpu))
    product = f"NVIDIA {gpu.replace(' SXM 80GB', '-SXM4-80GB').replace('H100 SXM', 'H100 80GB HBM3')}"
    machine = Machine(gpus=((product, 80 * 2**30),), cpu_cores=8, ram_bytes=2**37, disk_free_bytes=2**40)
    with pytest.raises(UserError, match="compute capability"):
        plan(job, Target(kind="local", machine=machine))


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_bf16_is_refused_on_gpus_without_it_and_not_where_that_is_unknown(precision: str) -> None:
    job = Job(model=find("llama-3.2-1b"), method="lora", engine="fsdp2", precision=precision)  # type: ignore[arg-type]
    for gpu in ("T4", "V100 SXM2 16GB"):
        with pytest.raises(UserError, match=rf"--precision {precision}: {gpu} computes no bf16") as error:
            plan(job, replace(ANY, gpu=gpu))
        assert "Leave --precision out" in error.value.advice
        assert plan(replace(job, precision="auto"), replace(ANY, gpu=gpu)).layout.precision == "fp16-mixed"
    machine = Machine(gpus=(("Tesla T4", 15 * 2**30),), cpu_cores=8, ram_bytes=2**37, disk_free_bytes=2**40)
    with pytest.raises(UserError, match="computes no bf16"):
        plan(job, Target(kind="local", machine=machine))
    assert hardware.gpu("RTX PRO 4500").dtypes == ()
    assert plan(job, replace(ANY, gpu="RTX PRO 4500")).layout.precision == precision


def test_machines_without_the_float8_recipe_are_not_ranked() -> None:
    job = Job(model=find("llama-3.2-1b"), engine="fsdp2", fp8="rowwise")
    found = {each.request.gpu_type for each in plans(job, ANY).plans}
    assert found
    assert all(float(hardware.gpu(name).compute_capability or 9) >= 9 for name in found if name)


@pytest.mark.parametrize(
    ("engine", "optimizer", "named"),
    [
        ("torchtune", "muon", "AdamW and SGD"),
        ("deepspeed", "muon", "complete matrices"),
        ("deepspeed", "adafactor", "complete matrices"),
        ("fsdp2", "paged-adamw", "bitsandbytes"),
        ("fsdp2", "adafactor", "in-place norms"),
    ],
)
def test_an_optimizer_that_the_engine_does_not_support_is_refused(
    engine: str, optimizer: str, named: str
) -> None:
    job = Job(model=find("llama-8b"), engine=engine, optimizer=optimizer)  # type: ignore[arg-type]
    assert named in (unsupported_job(job, 2) or "")


def test_adafactor_with_fsdp2_needs_pure_bf16() -> None:
    job = Job(model=find("llama-8b"), engine="fsdp2", optimizer="adafactor")
    assert "fp32 copies" in (unsupported_job(job) or "")
    assert unsupported_job(replace(job, precision="bf16")) is None


def suggestions(job: Job, target: Target) -> list[dict[str, Any]]:
    """What would fit instead, where the job does not: each as options and their values."""
    with pytest.raises(CannotFit) as raised:
        plan(job, target)
    return list(raised.value.suggestions)


def test_suggestions_for_several_gpus_exclude_optimizers_of_a_single_process() -> None:
    job = Job(model=find("llama-8b"), engine="torchtune", global_batch_size=8, seq_len=512)
    for changes in suggestions(job, replace(ANY, gpu="L4", nodes=2, gpus=1)):
        assert "optimizer.in_backward" not in changes


def test_full_training_that_does_not_fit_gets_8_bit_states_suggested() -> None:
    job = Job(model=find("llama-3.2-3b"), engine="torchtune", global_batch_size=8, seq_len=512)
    one = replace(ANY, gpu="L4", nodes=1, gpus=1)
    assert {"optimizer.name": "adamw8bit", "engine": "fsdp2", "precision": "bf16"} in suggestions(job, one)
    chosen = replace(job, optimizer="adamw8bit", engine="fsdp2", precision="bf16")
    assert plan(chosen, one).planned_only is None


def test_full_training_that_needs_an_optimizer_in_the_backward_pass_gets_it_suggested() -> None:
    job = Job(model=find("llama-8b"), engine="torchtune", global_batch_size=8, seq_len=512)
    one = replace(ANY, gpu="L4", nodes=1, gpus=1)
    (chosen,) = (changes for changes in suggestions(job, one) if "optimizer.in_backward" in changes)
    assert chosen["optimizer.name"] == "paged-adamw8bit"
    batch = chosen.get("global_batch_size", 8)
    lean = replace(job, optimizer="paged-adamw8bit", optimizer_in_backward=True, global_batch_size=batch)
    assert plan(lean, one).planned_only is None
