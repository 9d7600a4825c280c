"""The moments of a step: what is alive beside the states."""

from dataclasses import replace

import pytest

from estimator import memory
from tests.estimator.memory.llama_step import LLAMA, step


def test_autocast_keeps_16_bit_copies_of_the_weights_it_casts() -> None:
    mixed, plain = step(precision="bf16-autocast"), step(precision="bf16")
    more = memory.active(mixed)["activations"] - memory.active(plain)["activations"]
    assert more > 2 * LLAMA.linear_parameters


def test_a_pipeline_peaks_on_its_first_stage_with_many_micro_batches_in_flight() -> None:
    base = step(engine="megatron", precision="bf16", pipeline=4, accumulation=16, schedule="1f1b")
    few = replace(base, accumulation=1)
    assert memory.active(base)["activations"] > 3 * memory.active(few)["activations"]


def test_all_forward_all_backward_keeps_every_micro_batch_and_1f1b_one_a_stage() -> None:
    base = step(engine="megatron", pipeline=4, accumulation=16, schedule="1f1b", seq_len=8192)
    every = replace(base, schedule="afab")
    assert memory.active(every)["activations"] == pytest.approx(
        4 * memory.active(base)["activations"], rel=0.1
    )


def test_blocks_that_are_not_recomputed_keep_their_activations() -> None:
    none = step(checkpointing="none", method="lora", micro_batch_size=8)
    all_blocks = replace(none, checkpointing="full")
    second = replace(all_blocks, recompute_every=2)
    kept = [memory.active(setup)["activations"] for setup in (none, second, all_blocks)]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.1)
    beyond = replace(all_blocks, recompute_every=LLAMA.layers + 1)
    assert memory.active(beyond)["activations"] == pytest.approx(kept[0], rel=0.1)
