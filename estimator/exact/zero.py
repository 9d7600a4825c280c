"""States that cannot be traced: DeepSpeed's partitions, and optimizers whose kernels need a GPU.

They are computed from the parameter counts of the traced model.
"""

from __future__ import annotations

from estimator.setup import Setup
from estimator.vocabulary import OPTIMIZERS

TRACED_OPTIMIZERS = ("adamw", "sgd")
MOMENTS = {name: OPTIMIZERS[name].moments for name in TRACED_OPTIMIZERS}
WEIGHTS = ("weights", "adapters")  # each process has all scales of quantized ones


def optimizer_traced(setup: Setup) -> bool:
    """Return whether optimizer states and step can be traced on fake tensors; otherwise they are computed."""
    return setup.zero_stage is None and setup.optimizer in TRACED_OPTIMIZERS


def add_untraced_states(
    setup: Setup, peaks: dict[str, dict[str, int]], states: dict[str, int], sizes: dict[str, int]
) -> tuple[dict[str, dict[str, int]], dict[str, int], tuple[str, ...]]:
    """Add the states that could not be traced to peaks and states.

    Returns both (bytes by category), and the names of the computed categories. ``sizes``: numbers of
    parameters, "all" and "trained".
    """
    if setup.zero_stage is not None:
        computed = partitions(setup, states, sizes)
    elif not optimizer_traced(setup):
        computed = {"optimizer": _formula(setup)}
    else:
        return peaks, states, ()
    moments = {name: _filled(parts, computed) for name, parts in peaks.items()}
    return moments, _filled(states, computed), tuple(computed)


def _filled(parts: dict[str, int], computed: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in (parts | computed).items() if size}


def partitions(setup: Setup, traced: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of one process's ZeRO partition. ``traced``: bytes of the model by category.

    16-bit weights and gradients, an fp32 copy of the trained parameters and their fp32 moments. Stage 1
    partitions the last two over the processes, stage 2 also the gradients, stage 3 also the weights.
    Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1. With fp32 training the copy exists from stage 1.
    """
    stage, n = setup.zero_stage or 0, setup.shard
    size = 4 if setup.precision == "fp32" else 2
    trained = sizes["trained"]
    split = {
        name: n if stage >= first_stage else 1
        for name, first_stage in (("optimizer", 1), ("grads", 2), ("weights", 3))
    }
    states = {
        **{name: traced[name] // split["weights"] for name in WEIGHTS if name in traced},
        "gradients": size * trained // split["grads"],
        "master weights": 0 if size == 4 and stage == 0 else 4 * trained // split["optimizer"],
        "optimizer": 4 * MOMENTS.get(setup.optimizer, 2) * trained // split["optimizer"],
    }
    if setup.offload != "none":
        states |= {"master weights": 0, "optimizer": 0, "gradients": 0}
    return states


def _formula(setup: Setup) -> int:
    from estimator import memory

    return dict(memory.states(setup)).get("optimizer", 0)
