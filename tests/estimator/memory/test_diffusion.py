"""Memory of a UNet's training step: by hand, and in the order that practitioners report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import memory
from estimator.memory import latents
from estimator.memory.diffusion import ENCODERS
from estimator.models.diffusion import STABLE_DIFFUSION_XL
from estimator.plan import GIB
from estimator.setup import Setup
from estimator.vocabulary import IMAGE_TASK

PARAMETERS = STABLE_DIFFUSION_XL.parameters
FULL = Setup(
    model=STABLE_DIFFUSION_XL,
    engine="fsdp2",
    task=IMAGE_TASK,
    precision="bf16",
    expandable_segments=True,
    processes_per_node=1,
)
LORA = replace(FULL, method="lora", precision="bf16-mixed", lora_targets=STABLE_DIFFUSION_XL.all_linear)


def test_full_bf16_unet_training_takes_2_bytes_of_weights_2_of_gradients_4_of_moments() -> None:
    active_bytes = memory.active(FULL)
    assert (active_bytes["weights"], active_bytes["optimizer"]) == (2 * PARAMETERS, 4 * PARAMETERS)
    assert active_bytes["activations"] >= STABLE_DIFFUSION_XL.unet.saved_bytes(128, 128, 2)


def test_with_lora_the_unet_is_in_16_bits_and_the_adapters_in_fp32() -> None:
    active_bytes = memory.active(LORA)
    assert active_bytes["weights"] == 2 * PARAMETERS
    assert active_bytes["adapters"] == 4 * STABLE_DIFFUSION_XL.unet.lora_parameters(8)


@pytest.mark.parametrize(
    ("setup", "gib"),
    [
        # With caches, checkpointing, UNet alone, batch 1: below 24 GB with Adafactor (sd-scripts), and LoRA
        # below 16 GB (diffusers PR 4470). Reports without a whole configuration: sanity, no calibration.
        (replace(FULL, optimizer="adafactor", checkpointing="full"), 24e9 / GIB),
        (replace(LORA, checkpointing="full"), 16e9 / GIB),
    ],
)
def test_configurations_that_practitioners_run_fit_by_the_estimate(setup: Setup, gib: float) -> None:
    assert memory.needs(setup)[0].likely_bytes < gib * GIB


@pytest.mark.parametrize("setup", [FULL, LORA])
def test_checkpointing_reduces_memory_and_larger_images_or_batches_increase_it(setup: Setup) -> None:
    needs = memory.needs(setup)[0].likely_bytes
    assert memory.needs(replace(setup, checkpointing="full"))[0].likely_bytes < needs
    assert memory.needs(replace(setup, micro_batch_size=2))[0].likely_bytes > needs
    larger = replace(STABLE_DIFFUSION_XL, resolution=1536)
    assert memory.needs(replace(setup, model=larger))[0].likely_bytes > needs


def test_fsdp_shards_the_states_of_the_unet() -> None:
    alone = memory.active(FULL)
    shared = memory.active(replace(FULL, sharding="fsdp", shard=4, processes_per_node=4))
    for category in ("weights", "optimizer"):
        assert shared[category] == pytest.approx(alone[category] / 4, rel=0.01)


# (side, images) -> bytes at the peak of diffusers 0.42.1's AutoencoderKL.encode, without its weights
# (torch 2.13, FakeTensorMode, no gradients)
ENCODED = {(1024, 1): 2_696_937_472, (512, 8): 5_393_874_944}


@pytest.mark.parametrize("size", ENCODED)
def test_encoding_an_image_takes_the_traced_memory(size: tuple[int, int]) -> None:
    side, images = size
    model = replace(STABLE_DIFFUSION_XL, resolution=side)
    assert images * latents.image_bytes(model) == ENCODED[size]


def test_without_precomputed_latents_memory_includes_encoders_and_vae_activations() -> None:
    model = replace(STABLE_DIFFUSION_XL, loads_encoders=True)
    beside = replace(LORA, checkpointing="full", model=model)
    frozen = dict(STABLE_DIFFUSION_XL.frozen)
    texts = sum(parameters for name, parameters in frozen.items() if name != "VAE")
    active_bytes = memory.active(beside)
    assert active_bytes[ENCODERS] == 4 * frozen["VAE"] + 2 * texts
    assert active_bytes["activations"] == latents.image_bytes(model), "the peak is there"
