"""States that fake tensors can't show: DeepSpeed's partitions, and optimizers whose kernels need a GPU.

They are computed from the traced model's own parameter counts.
"""

from __future__ import annotations

from estimator.setup import Setup
from estimator.vocabulary import OPTIMIZERS

TRACED_OPTIMIZERS = ("adamw", "sgd")
MOMENTS = {name: OPTIMIZERS[name].moments for name in TRACED_OPTIMIZERS}
WEIGHTS = ("weights", "adapters")  # the scales of quantised ones are whole in each process


def optimizer_traced(setup: Setup) -> bool:
    """Whether the optimizer's states and step can be traced on fake tensors; else they are computed."""
    return setup.zero_stage is None and setup.optimizer in TRACED_OPTIMIZERS


def gradients_elsewhere(setup: Setup) -> bool:
    """Whether the engine moves each gradient into its own buffers as soon as it is there: DeepSpeed does."""
    return setup.zero_stage is not None


def with_states(
    setup: Setup, peaks: dict[str, dict[str, int]], states: dict[str, int], sizes: dict[str, int]
) -> tuple[dict[str, dict[str, int]], dict[str, int], tuple[str, ...]]:
    """Put the states that could not be traced into moments and states.

    Returns both (bytes by category), and the names of the categories that were computed. ``sizes`` are
    numbers of parameters: "all" and "trained".
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
    """Bytes of ZeRO's share of the states in one process; ``traced`` are the model's own bytes by category.

    16-bit weights and gradients, an fp32 copy of what is trained and its fp32 moments; stage 1 divides the
    last two by the processes, stage 2 the gradients too, stage 3 the weights. Rajbhandari et al. 2020
    (arXiv:1910.02054), section 3.1. In fp32 the copy exists from stage 1 on.
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
