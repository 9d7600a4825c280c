"""The moments of a step: what is alive beside the states."""

from dataclasses import replace

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


def test_a_document_mask_has_one_byte_for_each_pair_of_tokens_of_a_sequence() -> None:
    plain = step(micro_batch_size=3)
    more = (
        memory.active(replace(plain, document_mask=True))["activations"] - memory.active(plain)["activations"]
    )
    assert more == 3 * 2048**2
