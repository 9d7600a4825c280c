"""Compare variable-length attention with the mask: ``python -m benchmarks.gpu_speed.equality DEVICE``.

Trains one step of a small Llama with a sliding window and grouped queries on packed rows, with
transformers' mask and with the loop's attention function, in bf16 on a GPU. Attention with sinks, with values
narrower than keys, and with wide heads is compared alone. Prints the relative errors of loss (or result) and
gradients as JSON. On a CPU a reference of the kernels' contract takes their place.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

TOLERANCE = 1e-2  # relative, in bf16
DOCUMENTS = ((300, 212, 5), (511, 1), (128, 128, 256))  # tokens of each document of each row
WINDOW = 64
SHAPES = {  # heads of queries, of keys; width of keys, of values; sinks, window
    "sinks": (8, 2, 64, 64, True, WINDOW),
    "narrow values": (4, 4, 192, 128, False, None),
    "wide heads": (4, 2, 512, 512, False, None),
}


def measure(device: str) -> dict[str, Any]:
    """Compare a model with full attention, one with a sliding window, and attention of each shape."""
    errors = {kind: _compare(kind, device) for kind in ("llama", "mistral")}
    errors |= {name: _compare_attention(*shape, device) for name, shape in SHAPES.items()}
    return {"errors": errors, "tolerance": TOLERANCE, "equal": max(map(max, errors.values())) <= TOLERANCE}


def _compare(kind: str, device: str) -> tuple[float, float]:
    """Return the relative errors of the loss and of all gradients together."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from launchers.dataset.batches import TOKEN_MULTIPLE, collate, summed_cross_entropy
    from launchers.engines.loop import varlen

    options: dict[str, Any] = {"sliding_window": WINDOW} if kind == "mistral" else {}
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        **options,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = AutoModelForCausalLM.from_config(config).to(device, dtype)
    rows = _rows()
    results = []
    for multiple in (None, TOKEN_MULTIPLE):  # with the mask, without it
        if multiple is None:
            network.set_attn_implementation("sdpa")
        else:
            varlen.use(network)
        network.zero_grad()
        batch = collate(rows, 0, multiple).to(torch.device(device))
        loss = summed_cross_entropy(network(**batch.inputs, use_cache=False).logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        gradients = torch.cat([each.grad.flatten().float() for each in network.parameters()])
        results.append((loss.item(), gradients))
    (loss_by_mask, by_mask), (loss_by_lengths, by_lengths) = results
    return abs(loss_by_lengths / loss_by_mask - 1), float((by_lengths - by_mask).norm() / by_mask.norm())


def _compare_attention(
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    with_sinks: bool,
    window: int | None,
    device: str,
) -> tuple[float, float]:
    """Return the relative errors of the result and of all gradients, against fp32 scores with a mask."""
    import torch

    from launchers.engines.loop import varlen

    lengths = torch.tensor([0, *DOCUMENTS[0]], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    tokens, longest = sum(DOCUMENTS[0]), max(DOCUMENTS[0])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    inputs = [torch.randn(1, count, tokens, size).to(device, dtype) for count, size in shapes]
    if with_sinks:
        inputs.append(torch.randn(heads).to(device, dtype))
    place = torch.arange(tokens, device=device)
    document = torch.bucketize(place, lengths, right=True)
    distance = place[:, None] - place[None, :]
    hidden = (distance < 0) | (distance >= (window or tokens)) | (document[:, None] != document[None, :])
    results = []
    for kernel in (True, False):
        tensors = [
            each.detach().to(dtype if kernel else torch.float32, copy=True).requires_grad_()
            for each in inputs
        ]
        query, key, value, *sinks = tensors
        if kernel:
            options: dict[str, Any] = {"cu_seq_lens_q": lengths, "max_length_q": longest}
            options |= {"sliding_window": window, "s_aux": sinks[0] if sinks else None}
            output, _ = varlen.attention(None, query, key, value, None, **options)
        else:
            keys, values = (each.repeat_interleave(heads // key_heads, dim=1) for each in (key, value))
            scores = (query @ keys.mT * width**-0.5).masked_fill(hidden, float("-inf"))
            further = [each[None, :, None, None].expand(1, heads, tokens, 1) for each in sinks]
            output = (torch.cat([scores, *further], -1).softmax(-1)[..., :tokens] @ values).transpose(1, 2)
        (output.float() ** 2).sum().backward()  # type: ignore[no-untyped-call,unused-ignore]
        gradients = torch.cat([each.grad.flatten().float() for each in tensors if each.grad is not None])
        results.append((output.detach().float(), gradients))
    (result, gradient), (expected, expected_gradient) = results
    return tuple(
        float((one - other).norm() / other.norm())
        for one, other in ((result, expected), (gradient, expected_gradient))
    )  # type: ignore[return-value]


def _rows() -> list[Any]:
    import numpy as np

    from launchers.dataset.prepared import IGNORE, Row

    draw, rows = np.random.default_rng(0), []
    for lengths in DOCUMENTS:
        tokens = draw.integers(1, 512, sum(lengths)).astype(np.int32)
        labels = tokens.copy()
        labels[np.cumsum((0, *lengths[:-1]))] = IGNORE
        rows.append(Row(tokens=tokens, labels=labels, lengths=np.array(lengths, dtype=np.int32)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    if device == "cpu":
        from tests.launchers.engines.loop.varlen_kernel import registered

        with registered():
            print(json.dumps(measure(device)))
    else:
        print(json.dumps(measure(device)))


if __name__ == "__main__":
    main()
