"""Options of plan and estimate that have no effect are refused."""

from __future__ import annotations

import shlex

import pytest

from tests.estimator.cli.estimates import run as estimate
from tests.estimator.cli.test_plan import run as plan

PLAN = [
    ("--method full --lora-rank 8", "--lora-rank does not apply to --method full"),
    ("--method full --adapter-only", "--adapter-only does not apply"),
    ("--method full --modules-to-save norms", "--modules-to-save does not apply"),
    ("--method lora --quantization nf4", "use --method qlora"),
    ("--method adapter-v1 --lora-targets q_proj", "--lora-targets does not apply to --method adapter-v1"),
    ("--adapter-start-layer 4", "--adapter-start-layer does not apply to --method auto"),
    ("--engine fsdp2 --zero-offload cpu", "use --engine deepspeed"),
    ("--engine deepspeed --fsdp-offload cpu", "use --engine fsdp2"),
    ("--no-activation-checkpointing --recompute-every 2", "--recompute-every does not apply to --no-activ"),
    ("--tokens 1M --dataset-tokens 1M", "--tokens and --dataset-tokens both set the amount of training"),
    ("--nodes 2 --max-nodes 1", "--nodes 2 is more than --max-nodes 1"),
]
ESTIMATE = [
    ("--method full --lora-rank 8", "--lora-rank does not apply to --method full"),
    ("--method lora --adapter-start-layer 4", "--adapter-start-layer does not apply"),
    ("--method lora --upcast-frozen", "--upcast-frozen has no effect without --method qlora"),
    ("--reference-copy", "--reference-copy has no effect without --task dpo"),
    ("--reward-parameters 1000000", "--reward-parameters has no effect without --task grpo"),
    ("--optimizer sgd --fused-optimizer", "--fused-optimizer has no effect without --optimizer adamw"),
    ("--flat-parameters", "--flat-parameters has no effect without --sharding fsdp"),
    ("--no-sequence-parallel --gpus 2 --tp 2", ""),
    ("--virtual-stages 2", "--virtual-stages has no effect without --pp"),
    ("--no-packing --document-tokens 100", "--document-tokens has no effect without --packing"),
    ("--no-activation-checkpointing --recompute-what selective", "has no effect without --activation-check"),
    ("--attention math --flash-version 3", "--flash-version has no effect without --attention flash"),
    ("--offload-to nvme", "--offload-to has no effect without --offload"),
    ("--loss plain --loss-chunks 4", "--loss-chunks has no effect without --loss chunked"),
    ("--variable-length", "--variable-length does not apply: engine torchtune has its own attention"),
    ("--engine fsdp2 --device cpu --variable-length", "does not apply: its kernels need a GPU"),
    ("--engine fsdp2 --task reward --variable-length", "does not apply: task reward needs separate rows"),
    ("--engine fsdp2 --variable-length", ""),
    ("--gpu 'H100 SXM' --network-gbps 100", "--network-gbps has no effect on one node"),
    ("--gpu 'H100 SXM' --busbw-intra 100", "--busbw-intra has no effect on one GPU"),
    ("--gpu 'H100 SXM' --gpus 8 --nodes 2 --network-gbps 400 --rdma", ""),
]


@pytest.mark.parametrize(("options", "expected"), PLAN)
def test_plan_refuses_an_option_without_effect(options: str, expected: str) -> None:
    done = plan(f"--model llama-8b --no-here {options}")
    assert done.exit_code == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(("options", "expected"), ESTIMATE)
def test_estimate_refuses_an_option_without_effect(options: str, expected: str) -> None:
    done = estimate("--model", "llama-8b", *shlex.split(options))
    assert done.exit_code == (2 if expected else 0), done.output
    assert expected in done.stderr
