"""Variable-length attention compared with attention masks, using a reference of the kernel."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.engines.varlen import FAMILIES
from launchers.dataset import batches
from launchers.dataset.batches import collate, collate_pairs, summed_cross_entropy
from launchers.dataset.prepared import IGNORE, Prepared, Row
from launchers.engines.loop import model as loop_model
from launchers.engines.loop import varlen
from launchers.engines.loop.recompute import recompute
from launchers.engines.loop.tasks import text_task_of
from tests.launchers.engines.counting import Counting
from tests.launchers.engines.loop import families, runs
from tests.launchers.engines.loop.varlen_kernel import reference

WINDOW = 6  # shorter than the documents


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference)


def packed_rows() -> list[Row]:
    documents = runs.documents(5, seed=3)
    return [runs.joined(documents[:3]), runs.joined(documents[3:])]


def step(network: Any, batch: batches.MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one training step."""
    network.zero_grad()
    loss = summed_cross_entropy(network(**batch.inputs, use_cache=False).logits, batch.labels)
    loss.backward()
    return loss.item(), {
        name: each.grad for name, each in network.named_parameters() if each.grad is not None
    }


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_a_step_equal_those_with_an_attention_mask(family: str) -> None:
    window = families.FAMILIES.get(family, {}).get("sliding_window")
    network = families.network(family, **({"sliding_window": WINDOW} if window else {})).train()
    loss, gradients = step(network, collate(packed_rows(), 0))
    varlen.use(network)
    varlen_loss, varlen_gradients = step(network, collate(packed_rows(), 0, batches.TOKEN_MULTIPLE))
    assert varlen_loss == pytest.approx(loss, rel=1e-5)
    assert varlen_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(varlen_gradients[name], gradient, atol=2e-5, rtol=1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_receives_what_flash_attention_accepts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of torch 2.13, transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd."""
    parameters = inspect.signature(torch.nn.attention.varlen.varlen_attn)
    calls = []

    def checked(*arguments: Any, **options: Any) -> torch.Tensor:
        bound = parameters.bind(*arguments, **options)
        bound.apply_defaults()
        query, key, value, *lengths = (
            bound.arguments[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k")
        )
        assert {each.dtype for each in (query, key, value)} == {torch.bfloat16}
        assert {each.stride(-1) for each in (query, key, value)} == {1}
        assert key.shape == value.shape == (query.shape[0], key.shape[1], query.shape[2])
        assert all(each.dtype == torch.int32 and each.is_contiguous() for each in lengths)
        assert isinstance(bound.arguments["window_size"], tuple), "compared with (-1, 0) for causal attention"
        calls.append(bound.arguments["window_size"])
        return reference(*arguments, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", checked)
    window = families.FAMILIES.get(family, {}).get("sliding_window")
    network = families.network(family, **({"sliding_window": WINDOW} if window else {}))
    varlen.use(network.to(torch.bfloat16))
    network(**collate(packed_rows(), 0, batches.TOKEN_MULTIPLE).inputs, use_cache=False)
    assert set(calls) <= {(-1, 0), (WINDOW - 1, 0)}
    assert len(calls) == network.config.num_hidden_layers
    assert ((WINDOW - 1, 0) in calls) == bool(window)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_pass_over_a_micro_batch_reads_from_the_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        return query * (key.mean() + value.mean())

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    network = families.network(family).train()
    varlen.use(network)
    batch = collate(packed_rows(), 0, batches.TOKEN_MULTIPLE)
    with Counting() as counting:
        logits = network(**batch.inputs, use_cache=False).logits
        summed_cross_entropy(logits, batch.labels).backward()
    assert (counting.calls["fetched"], counting.calls["branches"]) == (0, 0)


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


@pytest.fixture
def _operator() -> Iterator[None]:
    """Register the reference for the CUDA-only torch operator on CPUs."""
    from torch.nn.attention import varlen as kernel

    def forward(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *ignored: Any) -> Any:
        max_q, max_k, _is_causal, scale, window, gqa, *_ = ignored
        output = reference(
            query,
            key,
            value,
            cu_q,
            cu_k,
            max_q,
            max_k,
            scale=scale,
            window_size=tuple(window),
            enable_gqa=gqa,
        )
        lse = torch.zeros(query.shape[1], len(query))
        return output, lse, torch.zeros(2, dtype=torch.uint64)

    def backward(gradient: Any, query: Any, key: Any, value: Any, *ignored: Any) -> Any:
        _out, _lse, cu_q, _cu_k, _max_q, _max_k, _is_causal, _rng, scale, window = ignored
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        groups = query.shape[1] // key.shape[1]
        calls = []
        for first, last in itertools.pairwise(cu_q.tolist()):
            q, k, v, d = (each[first:last].transpose(0, 1) for each in (query, key, value, gradient))
            k, v = (each.repeat_interleave(groups, dim=0) for each in (k, v))
            place = torch.arange(last - first)
            distance = place[:, None] - place[None, :]
            mask = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
            shares = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).softmax(-1)
            of_shares = d @ v.mT
            of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
            parts = (of_scores @ k, of_scores.mT @ q, shares.mT @ d)
            summed = [parts[0], *(each.unflatten(0, (-1, groups)).sum(1) for each in parts[1:])]
            calls.append([each.transpose(0, 1) for each in summed])
        return tuple(torch.cat(each) for each in zip(*calls, strict=True))

    with (
        kernel._varlen_attn.set_kernel_enabled("cpu"),
        kernel._varlen_attn_backward.set_kernel_enabled("cpu"),
    ):
        kernel._varlen_attn.register_kernel("cpu")(forward)
        kernel._varlen_attn_backward.register_kernel("cpu")(backward)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_operator")
@pytest.mark.parametrize("case_kind", ["none", "full", "selective"])
def test_compiled_and_recomputed_blocks_call_the_varlen_operator_of_torch(
    case_kind: str, tmp_path: Path
) -> None:
    network = families.network("qwen3").train()
    expected = step(network, collate(packed_rows(), 0))
    varlen.use(network)
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
