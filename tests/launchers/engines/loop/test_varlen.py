"""Variable-length attention compared with attention masks, using a reference of the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exact_families import SEQ_LEN, small_config, small_model
from estimator import memory
from estimator.engines.varlen import FAMILIES, HEAD_DIM_MULTIPLE, LARGEST_HEAD_DIM
from estimator.setup import Setup
from launchers.dataset import batches
from launchers.dataset.batches import collate, collate_pairs, summed_cross_entropy
from launchers.dataset.prepared import IGNORE, Prepared
from launchers.engines.loop import model as loop_model
from launchers.engines.loop import varlen
from launchers.engines.loop.recompute import recompute
from launchers.engines.loop.tasks import text_task_of
from tests.launchers.engines.counting import Counting
from tests.launchers.engines.loop import families, runs, varlen_kernel
from tests.launchers.engines.loop.varlen_models import DOCUMENTS, WIDE, WINDOW, network_of, packed_rows


@pytest.fixture
def _kernel() -> Iterator[None]:
    with varlen_kernel.registered():
        yield


def step(network: Any, batch: batches.MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one training step."""
    network.zero_grad()
    loss = summed_cross_entropy(network(**batch.inputs, use_cache=False).logits, batch.labels)
    loss.backward()
    return loss.item(), {
        name: each.grad for name, each in network.named_parameters() if each.grad is not None
    }


def assert_equal(name: str, gradient: torch.Tensor, expected: Any) -> None:
    """Compare sums in another order, in fp32."""
    close = 1e-4 * max(1.0, expected.abs().max().item())
    assert torch.allclose(gradient, expected, atol=close, rtol=1e-3), name


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_packed_documents_equal_those_of_each_alone(family: str) -> None:
    network = network_of(family)
    alone = [step(network, collate([document], 0)) for document in DOCUMENTS]
    varlen.use(network)
    loss, gradients = step(network, collate(packed_rows(), 0, batches.TOKEN_MULTIPLE))
    assert loss == pytest.approx(sum(each for each, _ in alone), rel=1e-5)
    assert gradients.keys() == set().union(*(each.keys() for _, each in alone))
    for name, gradient in gradients.items():
        assert_equal(name, gradient, sum(each[name] for _, each in alone if name in each))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "gemma4_text"])
def test_each_method_has_the_gradients_of_each_document_alone(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sinks, heads of two widths, and heads wider than the kernel's."""
    families.network(family, **WIDE.get(family, {})).save_pretrained(tmp_path / "model")
    settings = {"method": method, "lora": {"rank": 4, "targets": "all-linear"}}
    job = runs.make_job(
        tmp_path, tmp_path / "model", tmp_path, steps=1, settings=settings, precision="bf16-mixed"
    )
    monkeypatch.setattr(varlen.torch.cuda, "get_device_capability", lambda: (9, 0))
    results = []
    for device, rows, multiple in (("cpu", None, None), ("cuda", packed_rows(), batches.TOKEN_MULTIPLE)):
        layout = dataclasses.replace(job.plan.layout, device=device)
        placed = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
        network = loop_model.pretrained(placed, dtype=torch.float32, device=torch.device("cpu"))
        network = loop_model.made_trainable(network, placed, adapters_in_fp32=True)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in network.named_parameters():
            if "lora_B" in name:  # zero at first, so that lora_A would have no gradients
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        groups = [[document] for document in DOCUMENTS] if rows is None else [rows]
        results.append([step(network, collate(group, 0, multiple)) for group in groups])
    alone, [(loss, gradients)] = results
    assert loss == pytest.approx(sum(each for each, _ in alone), rel=1e-5)
    assert gradients
    for name, gradient in gradients.items():
        assert_equal(name, gradient, sum(each[name] for _, each in alone if name in each))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_receive_what_they_accept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of torch 2.13, transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd."""
    calls = []

    def checked(*arguments: Any, **options: Any) -> Any:
        query, key, value, cu_seq_q, cu_seq_k = arguments[:5]
        assert {each.dtype for each in (query, key, value)} == {torch.bfloat16}
        assert {each.stride(-1) for each in (query, key, value)} == {1}
        assert key.shape == value.shape == (query.shape[0], key.shape[1], query.shape[2])
        assert query.shape[2] <= LARGEST_HEAD_DIM
        assert query.shape[2] % HEAD_DIM_MULTIPLE == 0
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (cu_seq_q, cu_seq_k))
        calls.append(tuple(options["window_size"] if "window_size" in options else arguments[9]))
        return forward(*arguments, **options)

    def wide(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        assert {each.dtype for each in (query, key, value)} == {torch.bfloat16}
        assert query.shape == key.shape == value.shape
        assert query.shape[-1] > LARGEST_HEAD_DIM
        calls.append((-1, 0))
        return torch.zeros_like(query), query.new_zeros(1)

    forward = varlen_kernel.forward
    monkeypatch.setattr(varlen_kernel, "forward", checked)
    monkeypatch.setattr(varlen_kernel, "memory_efficient", wide)
    network = network_of(family).to(torch.bfloat16)
    varlen.use(network)
    with varlen_kernel.registered():
        network(**collate(packed_rows(), 0, batches.TOKEN_MULTIPLE).inputs, use_cache=False)
    assert set(calls) <= {(-1, 0), (WINDOW - 1, 0)}
    assert len(calls) == network.config.num_hidden_layers
    assert ((WINDOW - 1, 0) in calls) == bool(families.FAMILIES[family].get("sliding_window"))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_pass_over_a_micro_batch_reads_from_the_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        return query * (key.mean() + value.mean())

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(varlen.sinks, "sink_attention", lambda *each: (kernel(*each), None))
    monkeypatch.setattr(varlen.wide_heads, "wide_attention", lambda *each: (kernel(*each), None))
    network = network_of(family)
    varlen.use(network)
    batch = collate(packed_rows(), 0, batches.TOKEN_MULTIPLE)
    with Counting() as counting:
        logits = network(**batch.inputs, use_cache=False).logits
        summed_cross_entropy(logits, batch.labels).backward()
    assert (counting.calls["fetched"], counting.calls["branches"]) == (0, 0)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "glm4_moe_lite"])
def test_the_formula_counts_the_bytes_saved_for_the_backward_pass(family: str) -> None:
    """Grouped queries, sinks, heads of two widths and latent attention with heads of one width."""
    spec = small_model(family, scale=4, repeats=2)
    tokens, documents = 4 * SEQ_LEN, torch.arange(5, dtype=torch.int32) * SEQ_LEN
    network = families.network(family, **small_config(family, scale=4, repeats=2)).to(torch.bfloat16).train()
    varlen.use(network)
    weights = {each.untyped_storage().data_ptr() for each in network.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(
            input_ids=torch.arange(tokens)[None],
            position_ids=torch.arange(SEQ_LEN).repeat(4)[None],
            cu_seq_lens_q=documents,
            max_length_q=SEQ_LEN,
            use_cache=False,
        )
    measured = sum(
        each.untyped_storage().nbytes() for address, each in saved.items() if address not in weights
    )
    setup = Setup(
        model=spec,
        engine="deepspeed",
        precision="bf16-mixed",
        sharding="zero2",
        shard=8,
        loss="recomputed",
        seq_len=SEQ_LEN,
        micro_batch_size=4,
        variable_length=True,
    )
    assert memory.saved_bytes(setup) == pytest.approx(measured, rel=0.02)


def test_wide_heads_with_a_window_are_refused() -> None:
    query = torch.empty(1, 2, 8, 264)
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="sliding window"):
        varlen.attention(
            None, query, query, query, None, cu_seq_lens_q=lengths, max_length_q=8, sliding_window=4
        )


@pytest.mark.usefixtures("_kernel")
def test_a_window_hides_earlier_positions() -> None:
    network = families.network("qwen3")
    batch = collate(packed_rows(), 0, batches.TOKEN_MULTIPLE)
    varlen.use(network)
    full_logits = network(**batch.inputs).logits
    for layer in network.model.layers:
        layer.self_attn.sliding_window = WINDOW
    assert not torch.allclose(network(**batch.inputs).logits, full_logits)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("pairs", [False, True])
def test_a_padding_free_batch_has_the_tokens_labels_and_boundaries_of_its_rows(
    *, pairs: bool, multiple: int
) -> None:
    rows = runs.pairs(3) if pairs else packed_rows()
    put_together = collate_pairs if pairs else collate
    padded, joined = put_together(rows, 0), put_together(rows, 0, multiple)
    assert len(joined.input_ids) == 1
    assert joined.input_ids.shape[1] % multiple == 0
    assert (joined.tokens, joined.lengths.tolist()) == (padded.tokens, padded.lengths.tolist())
    unpadded = [ids[:length] for ids, length in zip(padded.input_ids, padded.lengths, strict=True)]
    assert torch.equal(joined.input_ids[0, : joined.tokens], torch.cat(unpadded))
    counted = padded.labels != IGNORE
    assert torch.equal(joined.labels[joined.labels != IGNORE], padded.labels[counted])
    assert torch.equal(joined.sum_by_sequence(joined.labels != IGNORE), padded.sum_by_sequence(counted))
    documents = [int(length) for row in rows for length in row.lengths]
    assert joined.cu_seq_lens is not None
    assert sorted(joined.cu_seq_lens.diff().tolist()[: len(documents)]) == sorted(documents)
    assert joined.max_length >= max(documents)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("task", ["sft", "dpo", "orpo", "simpo", "kto"])
def test_every_task_has_the_same_loss_and_metrics_without_padding(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"sft": runs.documents(4), "kto": runs.judged(3)[:4]}.get(task, runs.pairs(4))
    data_dir = runs.make_data(tmp_path / "data", rows, batch=4, steps=1, task=task)
    job = runs.make_job(
        tmp_path,
        runs.make_model(tmp_path / "model"),
        data_dir,
        steps=1,
        world=1,
        settings={"task": task, "method": "lora"},
        precision="bf16-mixed",
    )
    data, layout = Prepared(data_dir), dataclasses.replace(job.plan.layout, accumulation=2)
    monkeypatch.setattr(varlen.torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor)
    on_cuda = dataclasses.replace(layout, device="cuda")
    losses_by_task = {}
    for name, used in (("mask", layout), ("varlen", on_cuda)):
        placed = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=used))
        assert varlen.applies(placed) == (name == "varlen")
        network = loop_model.pretrained(placed, dtype=torch.float32, device=torch.device("cpu"))
        network = loop_model.made_trainable(network, placed, adapters_in_fp32=True).eval()
        model = _Model(network.float())
        learned = text_task_of(job.settings, padding_free=varlen.applies(placed))
        learned.begin(model, data, layout, 0, 0)
        counts = learned.counts(data, 0, 4)
        with Counting() as counting:
            outcomes = [
                learned.outcome(model, batch, counts) for batch in learned.batches(data, layout, 0, 0)
            ]
        assert name == "mask" or (counting.calls["fetched"], counting.calls["branches"]) == (0, 0)
        losses_by_task[name] = [float(sum(outcome.loss.detach() for outcome in outcomes))]
        losses_by_task[name] += [
            float(sum(each.metrics[key] for each in outcomes)) for key in learned.metrics
        ]
    assert losses_by_task["varlen"] == pytest.approx(losses_by_task["mask"], rel=1e-4, abs=1e-5)


class _Model:
    """A network as queried by tasks."""

    device = torch.device("cpu")

    def __init__(self, network: Any) -> None:
        self.module = network

    def logits(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs, use_cache=False).logits
        return logits


@pytest.mark.parametrize(
    ("changes", "precision"),
    [({"task": "reward"}, "bf16"), ({"method": "adapter-v2"}, "bf16"), ({}, "fp32")],
)
def test_models_that_the_varlen_kernel_does_not_support_use_an_attention_mask(
    changes: dict[str, Any], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen.torch.cuda, "get_device_capability", lambda: (9, 0))
    model = runs.make_model(tmp_path / "model")
    job = runs.make_job(tmp_path, model, tmp_path, steps=1, settings=changes, precision=precision)
    layout = dataclasses.replace(job.plan.layout, device="cuda")
    assert not varlen.applies(dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout)))


def test_a_gpu_older_than_ampere_uses_an_attention_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = runs.make_job(tmp_path, runs.make_model(tmp_path / "m"), tmp_path, steps=1, precision="bf16")
    job = dataclasses.replace(
        job, plan=dataclasses.replace(job.plan, layout=dataclasses.replace(job.plan.layout, device="cuda"))
    )
    for capability, expected in (((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(varlen.torch.cuda, "get_device_capability", lambda found=capability: found)
        assert varlen.applies(job) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("case_kind", ["none", "full", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_compiled_and_recomputed_blocks_call_the_varlen_operators(
    family: str, case_kind: str, tmp_path: Path
) -> None:
    network = network_of(family)
    varlen.use(network)
    expected = step(network, collate(packed_rows(), 0, batches.TOKEN_MULTIPLE))
    if case_kind != "none":
        job = runs.make_job(
            tmp_path,
            tmp_path,
            tmp_path,
            steps=1,
            engine="fsdp2",
            activation_checkpointing=True,
            settings={"recompute": {"what": case_kind}},
        )
        recompute(network.model.layers, job)
    for block in network.model.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    for rows in (packed_rows(), packed_rows()[::-1], packed_rows()[:1]):
        batch = collate(rows, 0, batches.TOKEN_MULTIPLE)
        loss, gradients = step(network, batch)
        if len(rows) > 1:
            assert loss == pytest.approx(expected[0], rel=1e-5)
            for name, gradient in expected[1].items():
                assert torch.allclose(gradients[name], gradient, atol=2e-5, rtol=1e-3), name
