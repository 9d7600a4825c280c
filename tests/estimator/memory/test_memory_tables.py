"""Published tables and rules of thumb, and the assumption under which each holds.

The table of Accelerate's training estimate: Z. Mueller, "Scaling Model Training with More Compute, How Do
They Do It?" (huggingface.co/spaces/muellerzr/llm-conf), made with `accelerate estimate-memory`. Its MB and
GB are 2^20 and 2^30 bytes. It takes the largest of its columns for the need; ours adds up what lives at once.
"""

from dataclasses import replace

import pytest

from benchmarks.estimators import nanotron_bytes
from estimator import hardware, memory
from estimator.models import PROJECTIONS, find
from estimator.plan import GIB, MIB
from estimator.setup import Setup
from estimator.vocabulary import Precision

# Beside its weights, Transformers of that time kept a causal mask of 8,192 x 8,192 fp32 values in Llama 3;
# AutoModel, which the tool loads, has no output head.
MASK = 4 * 8192**2
BERT, LLAMA = "bert-base-cased", "llama-3-8b"


def states(setup: Setup) -> dict[str, int]:
    return dict(memory.states(setup))


def base_bytes(model: str, bytes_a_parameter: float) -> float:
    """Bytes of the model without its output head, as AutoModel loads it."""
    spec = find(model)
    head = 0 if spec.tied_embeddings else spec.vocab * spec.hidden
    return bytes_a_parameter * (spec.parameters - head)


@pytest.mark.parametrize(
    ("model", "mask", "weights", "backward", "step"),
    [(BERT, 0, 413.18, 826.36, 1.61 * 1024), (LLAMA, MASK, 28.21 * 1024, 56.43 * 1024, 112.84 * 1024)],
)
def test_the_fp32_line_is_4_bytes_a_parameter_twice_in_the_backward_pass_and_4_times_in_the_step(
    model: str, mask: int, weights: float, backward: float, step: float
) -> None:
    """Without an output head, in fp32, with plain Adam: 4 bytes for each weight, gradient and moment."""
    sizes = base_bytes(model, 4) + mask
    assert sizes / MIB == pytest.approx(weights, rel=1e-3)
    assert 2 * sizes / MIB == pytest.approx(backward, rel=1e-3)
    assert 4 * sizes / MIB == pytest.approx(step, rel=3e-3)


@pytest.mark.parametrize("model", [BERT, LLAMA])
def test_fp32_training_holds_what_the_table_calls_the_optimizer_step(model: str) -> None:
    """Its "highest" is our sum of states: 16 bytes a parameter, activations left out."""
    found = states(Setup(model=find(model), precision="fp32", engine="transformers"))
    assert sum(found.values()) == 16 * find(model).parameters
    assert found["weights"] + found["gradients"] == 8 * find(model).parameters


@pytest.mark.parametrize("precision", ["bf16-autocast", "fp16-autocast"])
@pytest.mark.parametrize("model", [BERT, LLAMA])
def test_autocast_keeps_fp32_states_of_which_the_table_counts_half(model: str, precision: Precision) -> None:
    """Its 16-bit line has 4 bytes of weights and takes the 8 of Adam's moments for the highest.

    That is the largest term alone. Weights, moments and fp32 gradients are there together: 16 bytes, before
    the 16-bit copies that autocast makes.
    """
    found = states(Setup(model=find(model), precision=precision, engine="transformers"))
    parameters = find(model).parameters
    assert (found["weights"], found["optimizer"]) == (4 * parameters, 8 * parameters)
    assert sum(found.values()) == pytest.approx(16 * parameters, rel=0.01)


@pytest.mark.parametrize("model", [BERT, LLAMA])
def test_the_tables_highest_16_bit_line_is_training_wholly_in_bf16(model: str) -> None:
    """826 MB and 56.43 GB are 8 bytes a parameter: weights, gradients and both moments in bf16."""
    found = states(Setup(model=find(model), precision="bf16", engine="torchtune"))
    assert sum(found.values()) == 8 * find(model).parameters


# ---------------------------------------------------------------------------------------------------------
# Rules of thumb


def on(gpu: str, setup: Setup) -> float:
    """The upper bound of the need as a share of what that GPU has."""
    return memory.estimate(setup).needs_bytes / hardware.gpu(gpu).usable_bytes


@pytest.mark.parametrize("gpu", ["RTX 4090", "A10G", "L4"])
def test_7b_full_fits_one_card_of_24_gb_with_a_paged_optimizer_in_the_backward_pass(gpu: str) -> None:
    """In bf16, with checkpointing, chunked loss and 2 x 2,048 tokens.

    PagedAdamW's moments lie in host memory, and no gradient outlives its layer: 13.5 GB of weights remain.
    """
    setup = Setup(
        model=find("llama-2-7b"),
        optimizer="paged-adamw",
        optimizer_in_backward=True,
        checkpointing="full",
        loss="chunked",
        micro_batch_size=2,
    )
    assert on(gpu, setup) < 1


def test_7b_full_with_adamw_on_the_card_needs_3_cards_of_24_gb_for_its_states() -> None:
    """The rule's "1 card" is the paged optimizer's: plain AdamW holds 8 bytes a parameter, 54 GB."""
    whole = sum(states(Setup(model=find("llama-2-7b"))).values())
    assert 2 * hardware.gpu("RTX 4090").vram_bytes < whole < 3 * hardware.gpu("RTX 4090").vram_bytes


def test_70b_full_with_adamw_fills_8_cards_of_80_gb() -> None:
    """8 bytes a parameter are 64 of 80 GiB each: the rule holds, at 2,048 tokens, to a tenth of a card."""
    setup = Setup(model=find("llama-2-70b"), sharding="fsdp", shard=8, checkpointing="full")
    assert 64 * GIB < sum(states(setup).values()) < 65 * GIB
    assert 0.9 < on("A100 SXM 80GB", setup) < 1


@pytest.mark.parametrize("model", ["llama-2-7b", "mistral-7b"])
@pytest.mark.parametrize("gpu", ["RTX 4090", "A10G", "L4"])
def test_7b_lora_fits_one_card_of_24_gb(model: str, gpu: str) -> None:
    """The base in bf16, checkpointing, one sequence of 2,048 tokens."""
    setup = Setup(model=find(model), method="lora", checkpointing="full", loss="chunked")
    assert on(gpu, setup) < 1


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), PROJECTIONS])
@pytest.mark.parametrize("gpu", ["A2", "RTX A4000"])
def test_7b_qlora_fits_one_card_of_16_gb(targets: tuple[str, ...], gpu: str) -> None:
    """The base in NF4, checkpointing, one sequence of 2,048 tokens."""
    setup = Setup(
        model=find("llama-2-7b"),
        method="lora",
        quantization="nf4-double",
        lora_targets=targets,
        checkpointing="full",
        loss="chunked",
    )
    assert on(gpu, setup) < 1


# ---------------------------------------------------------------------------------------------------------
# Formulas of others, as benchmarks/estimators.py derives them anew


def test_the_playbooks_formula_gives_its_own_charts() -> None:
    """Ultra-Scale Playbook, cp_8Bmemoryusage: Llama 8B without parallelism.

    Activations 4.25 GiB at 1,024 tokens, 17 at 4,096; parameters 14.957 GiB, gradients too, moments 4 times.
    """
    setup = Setup(model=find("llama-8b"), precision="bf16-mixed", seq_len=1024)
    short, long = nanotron_bytes(setup), nanotron_bytes(replace(setup, seq_len=4096))
    assert (long - short) / GIB == pytest.approx(17 - 4.25)
    master = 4 * setup.model.parameters  # its formula has it, its charts leave it out
    assert (short - master) / GIB == pytest.approx(6 * 14.957 + 4.25, rel=1e-3)
