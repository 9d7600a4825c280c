"""The moments of a step: what is alive beside the states."""

from dataclasses import replace

from estimator import memory
from tests.estimator.memory.llama_step import LLAMA, step


def test_autocast_keeps_16_bit_copies_of_fp32_weights() -> None:
    mixed, plain = step(precision="bf16-autocast"), step(precision="bf16")
    more = memory.active(mixed)["activations"] - memory.active(plain)["activations"]
    assert more > 2 * LLAMA.linear_parameters


def test_the_first_pipeline_stage_peaks_with_many_micro_batches_in_flight() -> None:
    base = step(engine="megatron", precision="bf16", pipeline=4, accumulation=16, schedule="1f1b")
    few = replace(base, accumulation=1)
    assert memory.active(base)["activations"] > 3 * memory.active(few)["activations"]


def test_a_document_mask_takes_one_byte_per_pair_of_tokens() -> None:
    plain = step(micro_batch_size=3)
    more = (
        memory.active(replace(plain, document_mask=True))["activations"] - memory.active(plain)["activations"]
    )
    assert more == 3 * 2048**2
