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
SHAPES: dict[str, dict[str, int | bool]] = {
    "sinks": {"heads": 8, "key_heads": 2, "width": 64, "value_width": 64, "sinks": True, "window": WINDOW},
    "narrow values": {"heads": 4, "key_heads": 4, "width": 192, "value_width": 128},
    "wide heads": {"heads": 4, "key_heads": 2, "width": 512, "value_width": 512},
}


def measure(device: str) -> dict[str, Any]:
    """Compare a model with full attention, one with a sliding window, and attention of each shape."""
    errors = {kind: _compare(kind, device) for kind in ("llama", "mistral")}
    errors |= {name: _compare_attention(name, device) for name in SHAPES}
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


def _compare_attention(name: str, device: str) -> tuple[float, float]:
    """Return the relative error of the result, and the largest of the gradients, against fp32 scores."""
    import torch

    from launchers.engines.loop.self_check import AttentionShape, attention_errors

    shape = AttentionShape(**SHAPES[name])  # type: ignore[arg-type]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    of_result, *of_gradients = attention_errors(shape, torch.device(device), dtype, DOCUMENTS[0]).values()
    return of_result, max(of_gradients)


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
