"""LLaMA-Adapter v2 on transformers models, as litgpt trains it (litgpt/adapter_v2.py); PEFT only has v1.

Gao et al. 2023 (arXiv:2304.15010). Trained are prompts, which the upper blocks attend to in addition to the
text, through gates that start at 0; a scale and a bias for each output of every linear layer, including the
head; and all norms over the hidden size. Everything else is frozen. The trained tensors cannot be merged into
the base's weights: they are stored separately, and :func:`load` applies them to the base.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from launchers.engines.loop.whole_modules import norms
from launchers.models.hf_layout import ADAPTER_V2_CONFIG, ADAPTER_V2_WEIGHTS
from launchers.settings.sections import Adapter

ATTENTION = "adapter_v2"  # name in transformers' registries


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterV2:
    """Configuration of an adapter, stored next to its tensors as adapter_v2.json."""

    prompt_length: int
    start_layer: int  # the first block with a prompt

    @classmethod
    def of(cls, settings: Adapter) -> AdapterV2:
        """Build the configuration from a run's settings."""
        return cls(prompt_length=settings.prompt_length, start_layer=settings.start_layer)


def insert(model: Any, adapter: AdapterV2) -> None:
    """Freeze a transformers model and add an adapter that initially changes nothing.

    Prompts are drawn from the standard normal distribution, as litgpt's embeddings are.
    """
    model.requires_grad_(False)
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        module.adapter_scale = nn.Parameter(_like(module.weight, torch.ones, module.out_features))
        module.adapter_bias = nn.Parameter(_like(module.weight, torch.zeros, module.out_features))
        module.register_forward_hook(_rescale)
    config = model.config.get_text_config()
    for block in model.get_decoder().layers[adapter.start_layer :]:
        attention = block.self_attn
        weight, width = attention.k_proj.weight, attention.k_proj.in_features
        heads = config.num_attention_heads
        attention.adapter_prompt = nn.Parameter(_like(weight, torch.randn, adapter.prompt_length, width))
        attention.adapter_gate = nn.Parameter(_like(weight, torch.zeros, heads, 1, 1))
    for norm in norms(model):  # norms of queries and keys stay frozen, as in litgpt
        norm.requires_grad_(True)
    model.set_attn_implementation(ATTENTION)


def save(state: dict[str, torch.Tensor], adapter: AdapterV2, folder: Path) -> None:
    """Write the trained tensors, by their names in the model, and the adapter's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ADAPTER_V2_WEIGHTS)
    (folder / ADAPTER_V2_CONFIG).write_text(json.dumps(asdict(adapter), indent=2) + "\n")


def load(base: str | Path, folder: str | Path, **options: Any) -> Any:
    """Load the model ``base`` (a folder or a Hugging Face id) with the adapter in ``folder``, for inference.

    ``options`` are passed to from_pretrained. Raises RuntimeError if the adapter does not fit the model.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, **options)
    values = json.loads((Path(folder) / ADAPTER_V2_CONFIG).read_text())
    insert(model, AdapterV2(**{name: values[name] for name in AdapterV2.__slots__}))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = load_file(Path(folder) / ADAPTER_V2_WEIGHTS)
    if mismatched := sorted(trained ^ tensors.keys()):
        raise RuntimeError(f"{folder} is no adapter of {base}: {', '.join(mismatched[:3])}")
    model.load_state_dict(tensors, strict=False)
    return model.requires_grad_(False).eval()


def _like(weight: torch.Tensor, make: Any, *shape: int) -> torch.Tensor:
    tensor: torch.Tensor = make(*shape, device=weight.device, dtype=weight.dtype)
    return tensor


def _rescale(linear: Any, _: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Forward hook that returns scale * (W x + bias)."""
    rescaled: torch.Tensor = linear.adapter_scale * (output + linear.adapter_bias)
    return rescaled


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return torch's attention plus the attention to the prompt: [batch, positions, heads, head_dim]."""
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if hasattr(module, "adapter_prompt"):
        output = output + _prompt_attention(module, query, options["scaling"])
    return output, None


def _prompt_attention(module: Any, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute attention to the prompt, which has no positions, times each head's gate.

    The gate multiplies the probabilities instead of the result, so the backward pass keeps only a few values
    per position. Keys and values have no batch dimension, so the products copy nothing.
    """

    def by_head(projection: Any) -> torch.Tensor:
        states = projection(module.adapter_prompt).unflatten(-1, (-1, module.head_dim)).transpose(0, 1)
        return torch.as_tensor(states.repeat_interleave(module.num_key_value_groups, dim=0))

    keys, values = by_head(module.k_proj), by_head(module.v_proj)
    scores = torch.einsum("bhsd,hpd->bhsp", query, keys) * scaling
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("bhsp,hpd->bshd", module.adapter_gate * probabilities, values)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
