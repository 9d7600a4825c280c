"""Log-probabilities from the output head in chunks, compared with full logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.engines.liger import FAMILIES
from launchers.dataset import batches
from launchers.dataset.batches import collate_pairs, log_probabilities
from launchers.dataset.prepared import Prepared
from launchers.engines.loop import head
from launchers.engines.loop.model import made_trainable, pretrained
from launchers.engines.loop.tasks import chosen_labels, text_task_of
from tests.launchers.engines.loop import families, runs

# Logits as they are, capped, divided and multiplied; a head with a bias; a decoder of another name
VARIETIES = ("llama", "gemma2", "granite", "cohere", "phi", "mpt")
VOCAB = 320  # no other width
CHUNK = 16  # positions, of about 100 in a batch


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, head):
        monkeypatch.setattr(module, "LOSS_CHUNK", CHUNK)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in VARIETIES else pytest.mark.slow)
        for family in (*FAMILIES, "cohere")
    ],
)
def test_the_fused_head_has_the_values_and_gradients_of_full_logits_without_storing_them(family: str) -> None:
    scale = families.LOGIT_SCALES.get(family, {})
    network = families.network(family, vocab_size=VOCAB, **scale).train()
    batch = collate_pairs(runs.pairs(3), 0)
    labels = chosen_labels(batch)
    expected = log_probabilities(network(**batch.inputs, use_cache=False).logits, labels)
    (expected * expected).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    network.zero_grad()
    head.put_in(network, per_token=True)
    saved = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape[-2:]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fused = head.loss(network, labels, batch.inputs)
    assert not {(labels.shape[1], VOCAB), (labels.numel(), VOCAB)} & set(saved)
    (fused * fused).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(fused, expected, atol=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(network.get_parameter(name).grad, gradient, atol=1e-5, rtol=1e-4), name
    assert network(**batch.inputs).logits.shape[-1] == VOCAB


class _Model:
    """A network as queried by tasks."""

    device = torch.device("cpu")

    def __init__(self, network: Any) -> None:
        self.module = network

    def logits(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs, use_cache=False).logits
        return logits

    def fused_loss(self, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return head.loss(self.module, labels, inputs)


@pytest.mark.parametrize(
    ("task", "method"), [("dpo", "lora"), ("orpo", "full"), ("simpo", "lora"), ("kto", "full")]
)
def test_the_loss_metrics_and_gradients_of_a_task_equal_those_with_full_logits(
    task: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = runs.judged(12) if task == "kto" else runs.pairs(4)
    data_dir = runs.make_data(tmp_path / "data", rows, batch=4, steps=1)
    job = runs.make_job(
        tmp_path,
        runs.make_model(tmp_path / "model"),
        data_dir,
        steps=1,
        world=1,
        accumulation=2,
        settings={"task": task, "method": method},
    )
    job = runs.with_reference(job, tmp_path)
    monkeypatch.setattr("launchers.engines.loop.liger.use_block_kernels", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor)
    data, layout = Prepared(data_dir), job.plan.layout
    results, gradients = {}, {}
    for liger in (False, True):
        job = dataclasses.replace(job, settings=job.settings.model_copy(update={"liger": liger}))
        network = pretrained(job, dtype=torch.float32, device=torch.device("cpu"))
        model = _Model(made_trainable(network, job).eval())
        learned = text_task_of(job.settings, job.reference)
        learned.begin(model, data, layout, 0, 0)
        counts = learned.counts(data, 0, 4)
        outcomes = [learned.outcome(model, batch, counts) for batch in learned.batches(data, layout, 0, 0)]
        loss = sum(outcome.loss for outcome in outcomes)
        loss.backward()
        results[liger] = [float(loss.detach())]
        results[liger] += [float(sum(each.metrics[key] for each in outcomes)) for key in learned.metrics]
        gradients[liger] = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    assert results[True] == pytest.approx(results[False], rel=1e-5, abs=1e-6)
    assert gradients[True].keys() == gradients[False].keys()
    for name, gradient in gradients[False].items():
        assert torch.allclose(gradients[True][name], gradient, atol=1e-5, rtol=1e-3), name
