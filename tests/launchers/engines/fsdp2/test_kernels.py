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

from estimator.engines.automatic import PROVEN
from estimator.models import PROJECTIONS
from launchers.dataset.batches import MicroBatch, collate, micro_batches, summed_cross_entropy
from launchers.dataset.prepare import best_fit
from launchers.dataset.prepared import Prepared
from launchers.engines.fsdp2 import kernels
from launchers.engines.loop import model, varlen
from launchers.engines.loop.families import blocks
from launchers.engines.loop.recompute import recompute
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


def compiled_families() -> tuple[str, ...]:
    [families] = [row.families for row in PROVEN if (row.choice, row.engine) == ("compile", "fsdp2")]
    return families


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)],  # graphs only; with generated code
)
@pytest.mark.parametrize(
    ("family", "checkpointing"), [*zip(compiled_families(), itertools.cycle([False, True]), strict=False)]
)
def test_compiled_blocks_have_the_same_loss_and_gradients_as_eager_blocks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    checkpointing: bool,
    backend: str,
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    folder = runs.make_model(tmp_path)
    values = {"compile": True, "activation_checkpointing": checkpointing}
    job = runs.make_job(tmp_path, folder, tmp_path, steps=1, settings=values)
    network = families.network(family).train()
    rows = runs.documents(4, seed=3)
    batch = collate([runs.joined(rows[:2]), runs.joined(rows[2:])], 0)  # packed
    eager = loss_and_gradients(network, batch)
    recompute(blocks(network), job)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernels.set_up(network, job)
    compiled = loss_and_gradients(network, batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, (
        "one for all blocks, also recomputed ones"
    )
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5)
    for name, gradient in eager[1].items():
        assert torch.allclose(compiled[1][name], gradient, atol=2e-5, rtol=1e-3), name


def loss_and_gradients(network: Any, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    network.zero_grad()
    loss = summed_cross_entropy(network(**batch.inputs, use_cache=False).logits, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {
        name: each.grad for name, each in network.named_parameters() if each.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "qlora"},
        {"method": "lora", "fp8": "rowwise"},
        {"method": "full", "fp8": "rowwise", "activation_checkpointing": True},
    ],
    ids=["qlora", "lora-fp8", "full-fp8"],
)
def test_a_block_with_quantized_or_float8_layers_is_compiled_as_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    folder = runs.make_model(tmp_path)
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
def test_packed_batches_with_any_number_of_documents_need_one_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", in_one_op)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    job = runs.make_job(tmp_path, runs.make_model(tmp_path), tmp_path, steps=1, settings={"compile": True})
    network = families.network("llama")
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
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
