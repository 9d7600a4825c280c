"""Activations kept by activation checkpointing, counted by recomputed operations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launchers.engines.loop import model
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs

PRODUCTS_OF_A_BLOCK = 7


class _Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_model(tmp_path_factory.mktemp("model"))


def job_of(folder: Path, *, checkpointing: bool = True, **settings: Any) -> TrainJob:
    return runs.make_job(
        folder, folder, folder, steps=1, activation_checkpointing=checkpointing, settings=settings
    )


def repeated(job: TrainJob) -> tuple[int, int]:
    """Return products and attentions in a backward pass beyond those without checkpointing."""
    counts = []
    for checkpointing in (False, True):
        layout = dataclasses.replace(job.plan.layout, activation_checkpointing=checkpointing)
        other = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
        network = model.made_trainable(
            model.pretrained(other, dtype=torch.float32, device=torch.device("cpu")), other
        )
        ids = torch.arange(16)[None]
        loss = network(input_ids=ids, labels=ids, use_cache=False).loss
        with _Counted() as counted:
            loss.backward()
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        products = counted.operations["mm"] + counted.operations["quantized_product"]
        counts.append((products, counted.operations[attention]))
    (products, attentions), (products_again, attentions_again) = counts
    return products_again - products, attentions_again - attentions


@pytest.mark.parametrize(
    ("recompute", "products", "attentions"),
    [
        ({}, 2 * PRODUCTS_OF_A_BLOCK, 2),
        ({"every": 2}, PRODUCTS_OF_A_BLOCK, 1),
        ({"every": 3}, 0, 0),
        ({"what": "selective"}, 2 * 3, 0),
        ({"what": "selective", "every": 2}, 3, 0),
    ],
)
def test_only_the_chosen_activations_are_recomputed(
    folder: Path, recompute: dict[str, Any], products: int, attentions: int
) -> None:
    # the last product of a block is not run again where all of it is recomputed: nothing needs its result
    recomputed, attentions_again = repeated(job_of(folder, recompute=recompute))
    last = {(): 2, ("every",): 1}.get(tuple(recompute), 0) if products else 0
    assert (recomputed, attentions_again) == (products - last, attentions)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_products_of_adapters_are_recomputed_and_every_second_product_of_the_base_is_kept(
    folder: Path, method: str
) -> None:
    recomputed, attentions = repeated(job_of(folder, method=method, recompute={"what": "selective"}))
    assert attentions == 0
    full_count, _ = repeated(job_of(folder, method=method))
    assert full_count - recomputed == 2 * len(("q", "v", "gate", "down"))


@pytest.mark.parametrize("recompute_kind", ["full", "selective"])
def test_recomputation_changes_no_gradient(folder: Path, recompute_kind: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        job = job_of(folder, checkpointing=checkpointing, recompute={"what": recompute_kind})
        network = model.made_trainable(
            model.pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job
        )
        ids = torch.arange(16)[None]
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())
