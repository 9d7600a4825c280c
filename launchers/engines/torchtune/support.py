"""Limits of torchtune 0.6.1, each as one clause. Imports neither torch nor torchtune.

What follows from the model and the method is in ``estimator/engines/support.py``, by which plans choose
engines.
"""

from __future__ import annotations

from launchers.settings import Settings

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Hugging Face's names of the attention's linear layers -> torchtune's."""
# Keys of the YAML that follow from the plan, and the setting that changes each.
_PLANNED_KEYS = {
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "epochs": "epochs",
    "max_steps_per_epoch": "max_steps",
    "dtype": "precision",
    "device": "resources.device",
    "tensor_parallel_dim": "",
    "optimizer_in_bwd": "optimizer.in_backward",
    "resume_from_checkpoint": "",
    "save_adapter_weights_only": "",
    "output_dir": "output_dir",
    "shuffle": "",
    "dataset": "dataset",
    "collate_fn": "packing",
}


def unsupported_settings(settings: Settings) -> str | None:
    """Return the reason why torchtune 0.6.1 rejects these settings for any model, as one clause, or None."""
    for key in _PLANNED_KEYS.keys() & settings.engine_options.keys():
        advice = f"; set {_PLANNED_KEYS[key]} instead" if _PLANNED_KEYS[key] else ""
        return f"engine_options.{key} cannot be set by hand, the run's own accounting depends on it{advice}"
    return None
