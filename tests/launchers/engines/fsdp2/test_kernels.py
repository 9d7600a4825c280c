"""Layers in float8, and compiled blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import library

from benchmarks.exact_families import small_model
from estimator.engines.automatic import COMPILED
from estimator.engines.varlen import FAMILIES
from estimator.exact.transformers_models import configuration
from estimator.memory.activations.block import block_bytes
from estimator.models import PROJECTIONS
from estimator.setup import Setup
from launchers.dataset.batches import MicroBatch, collate, micro_batches, summed_cross_entropy
from launchers.dataset.prepare import best_fit
from launchers.dataset.prepared import Prepared
from launchers.engines.fsdp2 import kernels
from launchers.engines.loop import model, varlen
from launchers.engines.loop.families import blocks
from launchers.engines.loop.recompute import recompute
from launchers.models import causal
from tests.launchers.engines.loop import families, runs
from tests.launchers.engines.loop.varlen_kernel import reference


@pytest.mark.parametrize("method", ["full", "lora"])
def test_linear_layers_of_blocks_use_float8_and_heads_and_adapters_do_not(
    tmp_path: Path, method: str
) -> None:
    from torchao.float8.float8_linear import Float8Linear

    folder = runs.make_model(tmp_path)
    job = runs.make_job(tmp_path, folder, tmp_path, steps=1, settings={"method": method, "fp8": "tensorwise"})
    network = model.made_trainable(
        model.pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job
    )
    kernels.set_up(network, job)
    names = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, Float8Linear)
    }
    assert names == set(PROJECTIONS)
    assert not any("lora_" in name and isinstance(m, Float8Linear) for name, m in network.named_modules())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_float8_products_of_any_number_of_tokens_have_layouts_that_gpus_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, recipe: str
) -> None:
    """On the meta device torch checks sizes, strides and scales of a product as on CUDA."""
    folder = runs.make_model(tmp_path)
    job = runs.make_job(tmp_path, folder, tmp_path, steps=1, settings={"method": method, "fp8": recipe})
    network = model.made_trainable(
        model.pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job
    ).to("meta", torch.bfloat16)
    on_cuda = dataclasses.replace(job.plan, layout=dataclasses.replace(job.plan.layout, device="cuda"))
    kernels.set_up(network, dataclasses.replace(job, plan=on_cuda))
    product, products = torch._scaled_mm, []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        products.append(options)
        return product(*arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    network(input_ids=torch.ones(1, 1001, dtype=torch.int64, device="meta")).logits.sum().backward()
    layers = network.config.num_hidden_layers * len(PROJECTIONS)
    assert len(products) >= 3 * layers - (len(PROJECTIONS) if method == "lora" else 0)


# Kinds of blocks whose code differs: with and without rotary positions
KINDS = {"exaone4": 2, "smollm3": 2}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "minimax_m2")  # not compiled by default
BY_DAY = ("llama", "gemma3_text", "qwen3_moe")  # the other families are tested nightly


def cell(family: str, *values: str) -> Any:
    return pytest.param(family, *values, marks=() if family in BY_DAY else pytest.mark.nightly)


def cells(*kinds: str) -> list[Any]:
    """Pair each family with the next of the kinds."""
    families_and_kinds = zip((*COMPILED, *EXPERTS), itertools.cycle(kinds), strict=False)
    return [cell(family, kind) for family, kind in families_and_kinds]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)],  # graphs only; with generated code
)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*cells("none", "full", "selective", "lora"), ("llama", "lora")],
)
def test_compiled_blocks_have_the_same_loss_and_gradients_as_eager_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, backend: str
) -> None:
    """``kind``: what of a block is recomputed, all weights being trained, or LoRA."""
    compiler = functools.partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    settings: dict[str, Any] = {"compile": True, "method": "lora" if kind == "lora" else "full"}
    if kind == "selective":
        settings["recompute"] = {"what": "selective"}
    job = runs.make_job(
        tmp_path,
        runs.make_model(tmp_path),
        tmp_path,
        steps=1,
        settings=settings,
        activation_checkpointing=kind in ("full", "selective"),
    )
    network = families.network(family, **families.repeated(family))
    if kind == "lora":
        network = model.made_trainable(network, job)
        for name, weight in network.named_parameters():
            if "lora_B" in name:  # they begin as zeros
                torch.nn.init.normal_(weight, std=0.1)
    rows = runs.documents(4, seed=3)
    batch = collate([runs.joined(rows[:2]), runs.joined(rows[2:])], 0)  # packed
    eager = loss_and_gradients(network.train(), batch)
    recompute(blocks(network), job)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernels.set_up(network, job)
    compiled = loss_and_gradients(network, batch)
    # one for all blocks of a kind, also recomputed ones; the first one's input needs no gradient under LoRA
    graphs = KINDS.get(family, 1) + (kind == "lora")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    for name, gradient in eager[1].items():
        assert torch.allclose(compiled[1][name], gradient, atol=2e-5, rtol=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", EXPERTS)
def test_compiled_experts_in_bf16_use_the_grouped_product_of_torch(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, compiled code takes transformers' loop over the experts (5.23, integrations/moe.py)."""
    compiler = functools.partial(torch.compile, backend=backend, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr("transformers.integrations.moe._grouped_mm_fallback", None)
    monkeypatch.setattr("torch.ops.transformers.grouped_mm_fallback", None)
    job = runs.make_job(tmp_path, runs.make_model(tmp_path), tmp_path, steps=1, settings={"compile": True})
    network = families.network(family).to(torch.bfloat16).train()
    batch = collate(runs.documents(4, seed=3), 0)
    eager_loss, eager = loss_and_gradients(network, batch)
    torch._dynamo.reset()
    kernels.set_up(network, job)
    loss, gradients = loss_and_gradients(network, batch)
    assert loss == pytest.approx(eager_loss, rel=1e-2)
    for name, gradient in eager.items():
        difference = (gradients[name] - gradient).float().norm() / gradient.float().norm()
        assert difference < 0.05, name


def loss_and_gradients(network: Any, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    network.zero_grad()
    loss = summed_cross_entropy(network(**batch.inputs, use_cache=False).logits, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {
        name: each.grad for name, each in network.named_parameters() if each.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"method": "qlora"}, "llama"),
        ({"method": "lora", "fp8": "rowwise"}, "llama"),
        ({"method": "full", "fp8": "rowwise", "activation_checkpointing": True}, "llama"),
        ({"method": "qlora"}, "mixtral"),
    ],
    ids=["qlora", "lora-fp8", "full-fp8", "qlora-experts"],
)
def test_a_block_with_quantized_or_float8_layers_is_compiled_as_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], kind: str
) -> None:
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    folder = runs.make_model(tmp_path, kind)
    results = []
    for compiled in (False, True):
        job = runs.make_job(tmp_path, folder, tmp_path, steps=1, settings=settings | {"compile": compiled})
        network = model.made_trainable(
            model.pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        kernels.set_up(network, job)
        results.append(loss_and_gradients(network, collate(runs.documents(3, seed=3), 0)))
    # the first block's input needs no gradient where the embedding is frozen
    graphs = 1 if settings["method"] == "full" else 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    (eager_loss, eager), (loss, gradients) = results
    assert loss == pytest.approx(eager_loss, rel=1e-6)
    assert gradients.keys() == eager.keys()
    assert all(torch.allclose(gradients[name], eager[name], atol=1e-6, rtol=1e-3) for name in eager)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), cells("full", "lora"))
def test_compiled_blocks_save_the_bytes_that_plans_count(family: str, method: Any, tmp_path: Path) -> None:
    """On the meta device, AOTAutograd's partitioner decides as it does with Inductor."""
    spec, tokens = small_model(family, repeats=2), 512
    setup = Setup(
        model=spec, engine="fsdp2", method=method, precision="bf16", compile=True, fixed_length=True
    )
    with torch.device("meta"):
        network = causal.class_of(configuration(setup)).from_config(
            configuration(setup), dtype=torch.bfloat16
        )
    varlen.use(network)
    job = runs.make_job(
        tmp_path,
        runs.make_model(tmp_path),
        tmp_path,
        steps=1,
        precision="bf16",
        settings={"method": method, "lora": {"rank": setup.lora_rank}},
    )
    with torch.device("meta"):
        network = model.made_trainable(network, job).to(torch.bfloat16)
    saved: list[dict[int, torch.Tensor]] = []
    resident = {each.untyped_storage()._cdata for each in (*network.parameters(), *network.buffers())}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if saved and storage not in resident and not any(storage in earlier for earlier in saved):
            saved[-1][storage] = tensor
        return tensor

    for block in blocks(network):
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
        block.register_forward_pre_hook(lambda *_: saved.append({}))
    inputs = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 256, "max_length_k": 256}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        network(input_ids=inputs, position_ids=inputs, **packed, use_cache=False)
    # not the first block, which may get the embedding without a gradient, nor the last, as the head follows
    inner = [sum(each.untyped_storage().nbytes() for each in block.values()) for block in saved[1:-1]]
    assert block_bytes(setup) * tokens == pytest.approx(sum(inner) / len(inner), rel=0.05)


@library.custom_op("finetune_tests::varlen", mutates_args=())
def varlen_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    return reference(
        query, key, value, cu_seq, cu_seq, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True
    )


@varlen_op.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query)


def in_one_op(
    query: Any, key: Any, value: Any, cu_seq: Any, _: Any, longest: int, __: int, **options: Any
) -> Any:
    return varlen_op(query, key, value, cu_seq, longest, options["scale"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [cell(family) for family in (*COMPILED, *EXPERTS) if family in FAMILIES])
def test_packed_batches_with_any_number_of_documents_need_one_compilation(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", in_one_op)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    job = runs.make_job(tmp_path, runs.make_model(tmp_path), tmp_path, steps=1, settings={"compile": True})
    network = families.network(family, **families.repeated(family))
    varlen.use(network)
    kernels.set_up(network, job)
    documents = runs.documents(50, seed=4)
    bins = best_fit([len(each.tokens) for each in documents], 128)
    rows = [runs.joined([documents[index] for index in members]) for members in bins[:6]]
    runs.make_data(tmp_path / "data", rows, batch=2, steps=3)
    data, layout = Prepared(tmp_path / "data"), dataclasses.replace(job.plan.layout, processes_per_node=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for step in range(3):
            for batch in micro_batches(data, layout, step, 0, padding_free=True):
                network(**batch.inputs, use_cache=False)
    # windows are arguments of the kernel
    kinds = len(set(families.FAMILIES[family].get("layer_types", [family])))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == max(kinds, KINDS.get(family, 1))
