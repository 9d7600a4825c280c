"""Forward passes with fake tensors of a device that is not the CPU, in a separate process.

    python -m tests.launchers.engines.loop.fake_gpu

prints the error of each case, or an empty text, as JSON. Builds of torch without CUDA cannot index fake CUDA
tensors, so that the process registers a device of its own. Its autograd engine aborts on such a device:
backward passes of operators are called as functions, those of models are left out.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as kernel

from estimator.engines.varlen import FAMILIES
from launchers.dataset import batches
from launchers.dataset.batches import collate, summed_cross_entropy
from launchers.engines.fsdp2 import kernels
from launchers.engines.loop import head, sinks, varlen, wide_heads
from tests.launchers.engines.loop import varlen_models

DEVICE = "fake_gpu"
TOKENS, HEADS, KEY_HEADS = 40, 4, 2
WINDOWS = ([-1, 0], [15, 0])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def moved(network: Any) -> Any:
    """Replace parameters and buffers by fake tensors of the device."""
    for kind in ("_parameters", "_buffers"):
        for module in network.modules():
            tensors = getattr(module, kind)
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = empty(*tensor.shape, dtype=tensor.dtype)
                    tensors[name] = torch.nn.Parameter(fake) if kind == "_parameters" else fake
    return network


def forward_pass(network: Any, *, per_token: bool = False) -> None:
    """Run the forward pass of packed rows with variable-length attention."""
    varlen.use(network)
    if per_token:
        head.put_in(network, per_token=True)
    batch = collate(varlen_models.packed_rows(), 0, batches.TOKEN_MULTIPLE)
    with FakeTensorMode(), torch.no_grad():
        _fake_pass(moved(network), batch, per_token=per_token)


def _fake_pass(network: Any, batch: batches.MicroBatch, *, per_token: bool) -> None:
    inputs = {
        name: empty(*value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in batch.inputs.items()
    }
    labels = empty(*batch.labels.shape, dtype=batch.labels.dtype)
    if per_token:
        loss = head.loss(network, labels, inputs).sum()
    else:
        loss = summed_cross_entropy(network(**inputs, use_cache=False).logits, labels)
    assert (loss.device.type, loss.shape) == (DEVICE, ())


def float8(recipe: str) -> None:
    """Run a forward pass with float8 products, without their emulation on CPUs."""
    network = _network("llama")
    layout = SimpleNamespace(device="cuda")
    job: Any = SimpleNamespace(settings=SimpleNamespace(fp8=recipe), plan=SimpleNamespace(layout=layout))
    kernels._use_float8(network, job)
    forward_pass(network)


def properties(tensors: Any) -> list[tuple[Any, ...]]:
    return [(each.device, each.dtype, each.shape, each.stride()) for each in tensors]


def inputs_of(width: int) -> tuple[torch.Tensor, ...]:
    keys = [empty(TOKENS, KEY_HEADS, width) for _ in range(2)]
    return empty(TOKENS, HEADS, width), *keys, empty(3, dtype=torch.int32)


def sink_operator(window: list[int]) -> None:
    """Compare the operator's results with those that the compiler assumes, and run its backward pass."""
    query, key, value, lengths = inputs_of(64)
    arguments = (query, key, value, empty(HEADS), lengths, TOKENS, 0.125, window)
    computed = sinks.sink_attention._init_fn(*arguments)
    assert properties(computed) == properties(sinks.sink_attention(*arguments))
    context = SimpleNamespace(
        saved_tensors=(*arguments[:5], *computed),
        max_length=TOKENS,
        scale=0.125,
        window=window,
        needs_input_grad=[True] * 4,
    )
    gradients = sinks._gradients(context, torch.empty_like(query), None)
    assert properties(gradients[:4]) == properties(arguments[:4])


def wide_operators() -> None:
    query, key, value, lengths = inputs_of(512)
    arguments = (query, key, value, lengths, TOKENS, 0.125)
    computed = wide_heads.wide_attention._init_fn(*arguments)
    assert properties(computed) == properties(wide_heads.wide_attention(*arguments))
    # torch's shape function of the backward pass lacks an argument (wide_heads.py)
    further = (torch.empty_like(query), *arguments[:3], *computed, *arguments[3:])
    assert properties(wide_heads.wide_attention_backward(*further)) == properties(arguments[:3])


def torch_operators(window: list[int]) -> None:
    """Run what torch's operators call, with the arguments of the loop."""
    query, key, value, lengths = inputs_of(64)
    shared = (lengths, lengths, TOKENS, TOKENS, window == [-1, 0])
    output, lse, state = kernel._varlen_attn._init_fn(
        query, key, value, *shared, scale=0.125, window_size=window, **sinks.GROUPED
    )
    assert properties([output]) == properties([query])
    gradients = kernel._varlen_attn_backward._init_fn(
        torch.empty_like(output), query, key, value, output, lse, *shared, state, 0.125, window
    )
    assert [each.shape for each in gradients] == [each.shape for each in (query, key, value)]


def a_cpu_tensor_in_the_model() -> None:
    """Fail as a model does that creates a tensor without ``device``."""
    network = _network("llama")
    embedding = network.get_input_embeddings()
    forward = embedding.forward
    embedding.forward = lambda tokens: forward(tokens) + torch.ones(3, 4, 1)[:1, :1]
    forward_pass(network)


def in_fake_mode(function: Callable[..., None], *arguments: Any) -> None:
    with FakeTensorMode(), torch.no_grad():
        function(*arguments)


def _network(family: str) -> Any:
    return varlen_models.network_of(family).to(torch.bfloat16)


def forward_pass_of(family: str) -> None:
    forward_pass(_network(family))


CASES: dict[str, Callable[[], None]] = {
    **{f"forward pass of {family}": partial(forward_pass_of, family) for family in FAMILIES},
    "log-probabilities": lambda: forward_pass(_network("llama"), per_token=True),
    **{f"float8 {recipe}": partial(float8, recipe) for recipe in ("rowwise", "tensorwise")},
    **{f"sinks {window}": partial(in_fake_mode, sink_operator, window) for window in WINDOWS},
    **{f"torch {window}": partial(in_fake_mode, torch_operators, window) for window in WINDOWS},
    "wide heads": partial(in_fake_mode, wide_operators),
}
FAULTY: dict[str, Callable[[], None]] = {"a CPU tensor in the model": a_cpu_tensor_in_the_model}


def error_of(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:  # noqa: BLE001
        return traceback.format_exc()[-3000:]
    return ""


if __name__ == "__main__":
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    print(json.dumps({name: error_of(case) for name, case in (CASES | FAULTY).items()}))
