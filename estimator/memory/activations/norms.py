"""Norms and the inputs of matrix products: bytes that both save for the backward pass."""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.states import compute_size
from estimator.setup import Setup


def norm_bytes(setup: Setup, *, trained: bool) -> int:
    """Return the bytes per element that one norm saves; ``trained``: whether its weight is trained."""
    code = implementations.of(setup)
    if setup.model.norm == "layer":
        return compute_size(setup)  # torch's own kernel reads its input again
    if setup.precision == "fp32" or setup.precision.endswith("autocast"):
        return 4 + (code.norm_output_fp32 if trained else 0)
    return code.norm_input + (code.norm_output if trained else 0)


def input_divisor(setup: Setup) -> int:
    """Return the factor by which tensor parallelism divides the saved inputs of matrix products.

    torch's DTensor saves them gathered over the sequence, Megatron gathers them again (arXiv:2205.05198,
    section 4.2.2).
    """
    gathers_input = setup.engine == "megatron" and setup.sequence_parallel
    return setup.tensor if gathers_input else 1
