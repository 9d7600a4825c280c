"""Experts in 4 and 8 bits: outputs, gradients, storage, and the values that an export has to repeat."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from estimator.memory.buffers import dequantized_bytes
from estimator.models import hf_config
from estimator.setup import Setup
from estimator.vocabulary import LaunchedQuantization
from launchers.engines.loop import quantized, quantized_experts, quantized_model
from launchers.engines.loop.quantized_experts import QuantizedExperts
from launchers.engines.loop.quantized_loading import LoopQuantization
from launchers.models import causal
from tests.launchers.engines.loop import families

KINDS: tuple[LaunchedQuantization, ...] = get_args(LaunchedQuantization)
CPU = torch.device("cpu")
CLOSE = 1e-5
ROUTED = [
    name
    for name, fields in families.FAMILIES.items()
    if name != "llama4_text" and any("experts" in field for field in fields)
]

DIFFERENT = ("mixtral", "gpt_oss")  # experts in separate tensors of the files, and transposed with biases


def saved(family: str, folder: Path) -> Path:
    families.network(family).save_pretrained(folder)
    return folder


def loaded(folder: Path, kind: LaunchedQuantization) -> Any:
    options = {"dtype": torch.float32, "quantization_config": LoopQuantization(kind, CPU)}
    return causal.load(folder, **options).eval()


def logits(network: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a row, and the gradient of their sum of squares for the embeddings."""
    embeddings = network.get_input_embeddings()
    embeddings.weight.requires_grad_(True)
    embeddings.weight.grad = None
    found = network(torch.arange(3, 33)[None]).logits
    found.square().sum().backward()
    return found.detach(), embeddings.weight.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ROUTED)
def test_outputs_and_gradients_equal_those_of_experts_with_the_dequantized_weights(
    family: str, kind: LaunchedQuantization, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path)
    network, rounded = loaded(folder, kind), causal.load(folder, dtype=torch.float32).eval()
    plain = logits(rounded)[0]
    quantized_model.round_layers(rounded, kind)
    blocks = [module for module in network.modules() if isinstance(module, QuantizedExperts)]
    assert blocks
    for values, expected in zip(logits(network), logits(rounded), strict=True):
        torch.testing.assert_close(values, expected, atol=CLOSE * expected.abs().max().item(), rtol=CLOSE)
    assert (logits(network)[0] - plain).abs().max() > 10 * CLOSE, "quantization changes the outputs"
    for block in blocks:
        for name, shape in block.shapes.items():
            weight = getattr(block, name)
            held = weight.nbytes + sum(scale.nbytes for scale in block.scales(name).values())
            assert weight.grad is None
            assert held < (1.2 if kind == "int8" else 0.6) * shape.numel()
    assert not any("absmax" in name for name in network.state_dict())


Proved = Callable[[str, str], families.Proof]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """Finished runs with method qlora, those of one sharding together."""
    folder = tmp_path_factory.mktemp("qlora")

    @cache
    def of(sharding: str, different: bool) -> dict[str, families.Proof]:
        chosen = [family for family in ROUTED if (family in DIFFERENT) == different]
        proofs = families.prove(folder / str(different) / sharding, sharding, chosen, ["qlora"])
        return {proof.family: proof for proof in proofs}

    return lambda sharding, family: of(sharding, family in DIFFERENT)[family]


@pytest.mark.slow
@pytest.mark.timeout(2 * families.GANG_LIMIT_S)  # the first test of a sharding waits for its runs
@pytest.mark.parametrize(
    ("sharding", "family"),
    [
        pytest.param(sharding, family, marks=[] if family in DIFFERENT else [pytest.mark.nightly])
        for sharding in families.SHARDINGS
        for family in ROUTED
    ],
)
def test_two_processes_train_resume_and_export_experts_in_4_bits(
    sharding: str, family: str, proved: Proved, tmp_path: Path
) -> None:
    """Losses start at that of the dequantized weights; the merged model is these with the adapter."""
    resumed = proved(families.RESUMED[0], family)
    assert families.problems(proved(sharding, family), resumed, tmp_path) == []


class LiveBytes(TorchDispatchMode):
    """Live bytes of the storages that the experts' products allocate, and the peak of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.sizes, self.peaks = 0, dict[int, int](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.metaflow_finetune.quantized_experts_product.default:
            self.live, self.sizes = 0, dict.fromkeys(map(_storage, args), 0)
            self.peaks.append(0)
            with self:
                return quantized_experts.product._init_fn(*args, **kwargs or {})
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if self.peaks and isinstance(tensor, torch.Tensor) and _storage(tensor) not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[_storage(tensor)] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, _storage(tensor))
        self.peaks[-1:] = [max(self.peaks[-1], self.live)] if self.peaks else []
        return result

    def _free(self, storage: int) -> None:
        self.live -= self.sizes.pop(storage, 0)


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_product_holds_the_bytes_that_the_plan_counts_for_dequantized_experts(
    family: str, kind: LaunchedQuantization
) -> None:
    config = families.FAMILIES[family] | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 16,
    }
    network = families.network(family, **config).to(torch.bfloat16).requires_grad_(False)
    block = next(module for module, _ in quantized_experts._experts(network))
    weights = {
        name: weight.flatten(end_dim=1) for name, weight in block.named_parameters() if weight.ndim == 3
    }
    quantized_experts.replace(network, kind)
    for name, weight in weights.items():
        packed, scales = quantized.packed(weight, kind)
        getattr(block, name).data = packed
        block._buffers.update({f"{name}_{scale}": values for scale, values in scales.items()})
    inputs = torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.arange(16).view(8, 2)
    with LiveBytes() as live:
        block(inputs, chosen, torch.ones(8, 2, dtype=torch.bfloat16)).float().sum().backward()
    spec = hf_config.to_spec(network.config.to_dict(), family)
    setup = Setup(model=spec, engine="fsdp2", method="lora", quantization=kind)
    assert len(live.peaks) == 4, "two products, forward and backward"
    assert max(live.peaks) == pytest.approx(dequantized_bytes(setup), rel=0.01)
