"""torchtune's checkpointer for Qwen 2, with a fix for an error in 0.6.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from estimator.exact.torchtune_imports import torchtune_imports

with torchtune_imports():
    from torchtune import training
    from torchtune.training import FullModelHFCheckpointer

if TYPE_CHECKING:
    import torch

    class _Checkpointer:
        _config: dict[str, Any]

        def save_checkpoint(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None: ...

else:
    _Checkpointer = FullModelHFCheckpointer


class Qwen2Checkpointer(_Checkpointer):
    """Saves adapters that PEFT can use.

    The checkpointer reorders the rows of q's and k's lora_B from Llama's rotary layout to Hugging Face's
    for every model (models/convert_weights.py, tune_to_peft_adapter_weights). Qwen 2's rows are in the
    latter already (models/qwen2/_convert_weights.py reorders nothing): its adapters come out scrambled,
    while the merged weights are correct. So the rows are first reordered here in the inverse way.
    """

    def save_checkpoint(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        heads = {
            "q_proj.lora_b.weight": self._config["num_attention_heads"],
            "k_proj.lora_b.weight": self._config["num_key_value_heads"],
        }
        adapter = dict(state_dict.get(training.ADAPTER_KEY, {}))
        for name, weight in adapter.items():
            for suffix, count in heads.items():
                if name.endswith(suffix):
                    adapter[name] = interleave(weight, count)
        if adapter:
            state_dict[training.ADAPTER_KEY] = adapter
        super().save_checkpoint(state_dict, *args, **options)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from (a0 a1.. b0 b1..) to (a0 b0 a1 b1..), inverting torchtune's order."""
    rows, rank = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, rank)
    return halves.transpose(1, 2).reshape(rows, rank).contiguous()
