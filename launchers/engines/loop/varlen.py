"""Variable-length attention: documents are kept apart by cumulative lengths instead of a dense mask.

Registered with transformers under :data:`ATTENTION`. On CUDA it is FlashAttention by
``torch.nn.attention.varlen``; the other devices keep transformers' attention with its mask.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.nn.attention import varlen as kernel
from torch.nn.functional import pad

from estimator.engines import varlen
from launchers.engines.loop import sinks, wide_heads
from launchers.gang.job import TrainJob

ATTENTION = "varlen"  # name in transformers' registry
OLDEST_CAPABILITY = (8, 0)  # of Ampere, as FlashAttention-2 requires


def applies(job: TrainJob) -> bool:
    """Whether the loop trains this job's model with variable-length attention and padding-free batches."""
    return (
        job.plan.layout.device == "cuda"
        and job.settings.variable_length is not False
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
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document, by transformers' interface.

    ``query`` is [sequences, heads, tokens, head_dim]; ``key`` and ``value`` may have fewer heads, and
    ``value`` heads of another width. Returns [sequences, tokens, heads, width of the values' heads].
    ``sliding_window`` counts the token itself. ``s_aux``: attention sinks, [heads].
    """
    flat_query, flat_key, flat_value = (
        tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)
    )
    window = -1 if sliding_window is None else sliding_window - 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Any
    if query.shape[-1] > varlen.LARGEST_HEAD_DIM:
        if window >= 0:
            raise ValueError(f"heads of {query.shape[-1]} with a sliding window")
        output, _lse = wide_heads.wide_attention(
            flat_query, flat_key, flat_value, cu_seq_lens_q, max_length_q, scale
        )
    elif s_aux is not None:
        output, _lse = sinks.sink_attention(
            flat_query, flat_key, flat_value, s_aux, cu_seq_lens_q, max_length_q, scale, [window, 0]
        )
    else:
        width = value.shape[-1]
        if width < query.shape[-1]:
            flat_value = pad(flat_value, (0, query.shape[-1] - width))
        output = kernel.varlen_attn(
            flat_query,
            flat_key,
            flat_value,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scale,
            window_size=(window, 0),
            **sinks.GROUPED,
        )
        output = output[..., :width]
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def use(network: Any) -> None:
    """Make a transformers model compute attention with :func:`attention`, without a mask.

    transformers makes no mask for an attention function whose name has none registered. With one, it would
    look for packed rows in the positions, which waits for the GPU in each forward pass (5.23,
    masking_utils.py, find_packed_sequence_indices).
    """
    from transformers import AttentionInterface  # slow to import, unused on CPUs

    AttentionInterface.register(ATTENTION, attention)
    network.set_attn_implementation(ATTENTION)
