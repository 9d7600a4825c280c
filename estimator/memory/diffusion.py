"""Live bytes of a UNet's training step in addition to its states, by moment.

Saved activations are counted exactly (estimator/models/unet.py). Temporary tensors are small in comparison:
gradients of the largest feature map, and fp32 copies of the prediction and the noise.
"""

from __future__ import annotations

from estimator.memory import latents
from estimator.memory.buffers import Buffers, optimizer_temporary_bytes
from estimator.memory.shape import Part
from estimator.memory.states import adapter_size, compute_size
from estimator.models.diffusion import DiffusionSpec
from estimator.models.unet import Adapters
from estimator.setup import Setup

AVERAGE = "average of the weights"
ENCODERS = "VAE and text encoders"
TEXTS = "text encoders"
_LATENT_CHANNELS = 4
_LOSS_COPIES = 4  # fp32: prediction, target, their difference, and its gradient


def moments(
    setup: Setup, model: DiffusionSpec, part: Part, gradients: int, communication: Buffers
) -> list[dict[str, int]]:
    """Return the live bytes by category, without states, in encoding, loss, backward pass and optimizer."""
    side, images, size = model.latent_side, setup.micro_batch_size, compute_size(setup)
    adapters = adapters_of(setup)
    recomputed = setup.checkpointing != "none"
    saved = images * model.unet.saved_bytes(
        side, side, size, adapters=adapters, recomputed=recomputed, texts_trained=model.trains_texts
    )
    if model.trains_texts and adapters is not None:
        saved += images * sum(
            encoder.saved_bytes(size, adapters, recomputed=recomputed) for encoder in model.texts
        )
    unit = images * model.unet.largest_unit_saves(side, side, size, adapters) if recomputed else 0
    # input of the last residual block, including the skip connection, and its result
    first = model.unet.channels[0]
    input_copies = images * size * 4 * first * side * side
    loss = images * 4 * _LOSS_COPIES * _LATENT_CHANNELS * side * side
    accumulated = gradients if setup.accumulation > 1 else 0
    encoding = images * latents.image_bytes(model) if model.loads_encoders else 0
    return [
        {"activations": encoding, "gradients": accumulated},
        {
            "activations": saved,
            "logits and loss": loss,
            "gradients": accumulated,
            "communication buffers": communication.at_loss,
        },
        {
            "activations": saved + unit + input_copies,
            "gradients": max(accumulated, 0 if setup.adapters else gradients // 2),
            "communication buffers": communication.backward + communication.reduced,
        },
        {
            "activations": unit + input_copies,
            "gradients": gradients,
            "communication buffers": communication.gathered + communication.reduced + communication.last,
        },
        {"gradients": gradients, "optimizer temporaries": optimizer_temporary_bytes(setup, part)},
    ]


def adapters_of(setup: Setup) -> Adapters | None:
    """Return the LoRA adapters of a step, on which activations depend; None if all weights are trained."""
    if not setup.adapters:
        return None
    return Adapters(setup.lora_rank, in_fp32=adapter_size(setup) == 4)


def average_bytes(setup: Setup) -> int:
    """Return the bytes of the fp32 moving average of the trained weights; sharded as the weights are."""
    return 4 * setup.trainable_parameters // (setup.shard if setup.sharding == "fsdp" else 1)
