"""Variable-length attention: documents are kept apart by cumulative lengths instead of a dense mask.

Registered with transformers under :data:`ATTENTION`. On CUDA it is FlashAttention by
``torch.nn.attention.varlen``; the other devices keep transformers' attention with its mask.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch.nn.attention import varlen as kernel

from estimator.engines import varlen
from launchers.gang.job import TrainJob

ATTENTION = "varlen"  # name in transformers' registry
OLDEST_CAPABILITY = (8, 0)  # of Ampere, as FlashAttention-2 requires
# torch 2.11 supports grouped queries without this argument, which newer releases need
_PARAMETERS = inspect.signature(kernel.varlen_attn).parameters
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}


def applies(job: TrainJob) -> bool:
    """Whether the loop trains this job's model with variable-length attention and padding-free batches."""
    return (
        job.plan.layout.device == "cuda"
        and varlen.unsupported(job.model.spec, job.settings.task, job.plan.method, job.plan.layout.precision)
        is None
        and job.settings.vision is None  # positions depend on the images
        and torch.cuda.get_device_capability() >= OLDEST_CAPABILITY
        and not _attention_dropout(job)
    )


def _attention_dropout(job: TrainJob) -> float:
    """Return the dropout of attention probabilities, which the kernel does not support."""
    config = json.loads((job.model_dir / "config.json").read_text())
    return float(config.get("attention_dropout") or 0.0)


def attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document, by transformers' interface.

    ``query`` is [sequences, heads, tokens, head_dim]; ``key`` and ``value`` may have fewer heads. Returns
    [sequences, tokens, heads, head_dim]. ``sliding_window`` counts the token itself.
    """
    flat_query, flat_key, flat_value = (
        tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)
    )
    output: Any = kernel.varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_GROUPED,
    )
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def use(network: Any) -> None:
    """Make a transformers model compute attention with :func:`attention`, without a mask.

    transformers makes no mask for an attention function whose name has none registered. With one, it would
    look for packed rows in the positions, which waits for the GPU in each forward pass (5.23,
    masking_utils.py, find_packed_sequence_indices).
    """
    from transformers import AttentionInterface  # slow to import, unused on CPUs

    AttentionInterface.register(ATTENTION, attention)
    network.set_attn_implementation(ATTENTION)
