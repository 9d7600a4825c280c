"""Liger-Kernel's kernels in plans: who can have them, and what they save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator import Job, Target, UserError
from estimator.engines.setups import setup_of
from estimator.engines.support import unsupported_job
from estimator.job import Machine
from estimator.memory.activations.block import block_bytes
from estimator.memory.logits import loss_bytes
from estimator.memory.shape import part_of, stages
from estimator.models import find
from estimator.plan import GIB
from estimator.planning.planner import plan
from estimator.throughput.flops import work
from tests.estimator.memory.test_memory import layout_of

JOB = Job(model=find("llama-8b"), engine="fsdp2", liger=True, global_batch_size=16)
EIGHT = Target(kind="catalogue", nodes=1, gpus=8, gpu="H100 SXM")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": "torchtune"}, "torchtune has its own"),
        ({"engine": "trl", "task": "grpo", "method": "lora"}, "next-token prediction"),
        ({"task": "reward", "method": "lora"}, "task reward has none"),
        ({"model": find("qwen-7b")}, "a qwen model"),
        ({"method": "adapter-v1"}, "liger with method adapter-v1"),
        ({"method": "lora", "trained_modules": ("lm_head",)}, "the weight of the head"),
    ],
)
def test_an_engine_without_liger_kernels_is_rejected_with_a_reason(
    fields: dict[str, Any], words: str
) -> None:
    job = replace(JOB, **fields)
    reason = unsupported_job(job)
    assert reason is not None
    assert words in reason
    assert "liger" not in (unsupported_job(replace(job, liger=False)) or "")


def test_liger_selects_an_engine_that_supports_it_and_is_refused_on_cpus() -> None:
    chosen = plan(replace(JOB, engine="auto"), EIGHT)
    assert chosen.engine in ("deepspeed", "fsdp2")
    assert chosen.planned_only is None
    small = replace(JOB, model=find("tiny-llama"), seq_len=128)
    machine = Machine(ram_bytes=32 * GIB, cpu_cores=8, disk_free_bytes=64 * GIB)
    with pytest.raises(UserError, match="need a GPU, and this job runs on CPUs"):
        plan(small, Target(kind="local", machine=machine))


def test_liger_saves_the_memory_of_logits_and_of_norm_and_mlp_activations() -> None:
    layout = layout_of(seq_len=4096, micro_batch_size=2, sharding="fsdp", processes_per_node=8)
    without, with_them = (setup_of(replace(JOB, liger=on), layout) for on in (False, True))
    assert (with_them.loss, without.loss) == ("fused", "recomputed")
    model, tokens = JOB.model, 2 * 4096
    part = part_of(with_them, stages(with_them)[-1])
    # ops/fused_linear_cross_entropy.py: 128,256 / 4,096 are 32 pieces of 256 tokens, in 16 bits
    assert loss_bytes(with_them, part, tokens).peak == 2 * (
        256 * model.vocab + tokens * model.hidden + part.head
    )
    assert loss_bytes(without, part, tokens).peak > 4 * loss_bytes(with_them, part, tokens).peak
    # two norms' inputs in 16 bits instead of fp32, and not their results; of the MLP the activation's result
    saved = 2 * (4 + 2 - 2) * model.hidden + 2 * model.ffn
    assert block_bytes(without) - block_bytes(with_them) == saved


@pytest.mark.parametrize("name", ["gemma-3-12b", "qwen3-30b-a3b", "glm-4-9b"])
def test_families_without_kernels_for_blocks_have_the_loss_without_logits(name: str) -> None:
    layout = layout_of(seq_len=4096, micro_batch_size=2, sharding="fsdp", processes_per_node=8)
    job = replace(JOB, model=find(name), method="lora")
    without, with_loss = (setup_of(replace(job, liger=on), layout) for on in (False, True))
    assert (with_loss.loss, with_loss.engine_version) == ("fused", "")
    assert block_bytes(with_loss) == block_bytes(without)
    part = part_of(with_loss, stages(with_loss)[-1])
    saved = loss_bytes(without, part, 8192).peak - loss_bytes(with_loss, part, 8192).peak
    assert saved > 2 * 8192 * job.model.vocab


def test_preference_losses_with_liger_keep_no_logits_and_recompute_the_head() -> None:
    layout = layout_of(seq_len=4096, micro_batch_size=2, sharding="fsdp", processes_per_node=8)
    dpo = replace(JOB, task="dpo", method="lora")
    without, with_them = (setup_of(replace(dpo, liger=on), layout) for on in (False, True))
    model, tokens = JOB.model, 4 * 4096
    part = part_of(with_them, stages(with_them)[-1])
    # launchers/engines/loop/head.py: 1,024 positions at a time, and the gradient of the hidden states
    assert loss_bytes(with_them, part, tokens).peak == (
        1024 * model.vocab * (2 + 12) + 2 * tokens * model.hidden
    )
    assert loss_bytes(without, part, tokens).peak > 4 * loss_bytes(with_them, part, tokens).peak
    once = 2 * model.vocab * model.hidden * tokens
    assert work(with_them).head - work(without).head == pytest.approx(once)
