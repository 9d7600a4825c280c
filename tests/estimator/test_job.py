"""Jobs and targets refuse what cannot be, in one line with the value."""

from typing import Any

import pytest

from estimator.errors import UserError
from estimator.job import Job, Machine, Target
from estimator.models import find

MACHINE = Machine(cpu_cores=2, ram_bytes=8 * 2**30, disk_free_bytes=2**30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "tiny-llama"}, "model = 'tiny-llama' is a name"),
        ({"seq_len": 0}, "--seq-len 0"),
        ({"seq_len": 4096}, "--seq-len 4096 is longer than the 2048 tokens that tiny-llama"),
        ({"global_batch_size": 8, "micro_batch_size": 3}, "8 is not divisible by --micro-batch-size 3"),
        ({"method": "prefix"}, "--method prefix"),
        ({"tensor_parallel": 2}, "is not supported by torchtune"),
        ({"engine": "megatron", "tensor_parallel": 3}, "--tp 3 does not divide the 8 attention"),
        ({"engine": "torchtitan", "expert_parallel": 2}, "--ep 2 does not divide the 0 exp"),
        ({"precision": "bf16-mixed"}, "torchtune keeps no fp32 master weights"),
        ({"zero_stage": 2}, "belong to DeepSpeed"),
        ({"engine": "deepspeed", "zero_stage": 4}, "--zero-stage 4 is not possible"),
        ({"engine": "deepspeed", "zero_stage": 0, "offload": "cpu"}, "needs ZeRO stage 1, 2 or 3"),
        ({"method": "lora", "lora_rank": 0}, "--lora-rank 0"),
        ({"method": "lora", "lora_targets": ()}, "--lora-targets is empty"),
        ({"method": "lora", "lora_targets": ("wq",)}, "'wq'"),
    ],
)
def test_an_invalid_job_value_is_named_in_the_error(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Job(**({"model": find("tiny-llama")} | change))
    assert words in caught.value.problem
    assert "\n" not in caught.value.problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "slurm"}, "target kind 'slurm'"),
        ({"device": "tpu"}, "--device tpu"),
        ({"capacity": "plenty"}, "--capacity plenty"),
        ({"nodes": 0}, "--nodes 0"),
        ({"gpus": 0}, "--gpus 0"),
        ({"machine": None}, "needs a description of the machine"),
    ],
)
def test_an_invalid_target_value_is_named_in_the_error(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Target(**({"machine": MACHINE} | change))
    assert words in caught.value.problem
