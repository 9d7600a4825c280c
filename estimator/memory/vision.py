"""Memory of a vision tower and its projector, next to the language model."""

from __future__ import annotations

from estimator.setup import Setup

# Values that a block keeps for its backward pass: inputs of two norms and of four products over the hidden
# size, queries, keys and values, attention's result; the MLP's width before and after its activation
_KEPT_HIDDEN, _KEPT_FFN = 9, 2


def trained_parameters(setup: Setup) -> int:
    """Count the trained parameters outside the language model."""
    tower = setup.model.vision
    if tower is None or setup.vision is None:
        return 0
    if setup.vision == "full":
        return tower.parameters + tower.projector_parameters
    if setup.vision == "lora":  # two matrices on each of a block's four square and two MLP layers
        block_width = 8 * tower.hidden + 2 * (tower.hidden + tower.ffn)
        return tower.layers * setup.lora_rank * block_width
    return 0 if setup.adapters else tower.projector_parameters


def parameters(setup: Setup) -> int:
    """Count the parameters outside the language model, trained or not."""
    tower = setup.model.vision
    if tower is None or setup.vision is None:
        return 0
    return tower.parameters + tower.projector_parameters


def activation_bytes(setup: Setup, size: int) -> int:
    """Return the bytes saved for one micro batch's images until the backward pass.

    ``size``: bytes of one value. A frozen tower only saves its last result, for the projector; a trained one
    also saves activations of each block.
    """
    tower = setup.model.vision
    if tower is None or setup.vision is None:
        return 0
    images = setup.micro_batch_size * setup.images_per_row
    patches = images * tower.patches_of(setup.image_size, setup.image_size)
    tokens = images * tower.tokens_of(setup.image_size, setup.image_size)
    saved = patches * tower.hidden + 2 * tokens * setup.model.hidden
    if setup.vision != "frozen":
        saved += tower.layers * patches * (_KEPT_HIDDEN * tower.hidden + _KEPT_FFN * tower.ffn)
    return saved * size
