"""Which activations a plan recomputes where they do not all fit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from estimator import Job, Target
from estimator.errors import CannotFit
from estimator.models import find
from estimator.planning.next_plan import after_out_of_memory
from estimator.planning.planner import plan
from estimator.planning.report import render
from estimator.planning.run_command import run_command

OPEN: dict[str, Any] = {"packing": None, "compile": None, "liger": None}
JOB = Job(model=find("llama-8b"), method="lora", engine="fsdp2", global_batch_size=16, **OPEN)
ONE = Target(kind="catalogue", nodes=1, gpus=1, gpu="RTX 4090")


@pytest.mark.parametrize(
    ("changes", "gpu"),
    [({}, "RTX 4090"), ({"engine": "deepspeed", "seq_len": 8192}, "L40S")],
)
def test_the_fastest_recomputation_is_chosen_and_compared_with_full_checkpointing(
    changes: dict[str, Any], gpu: str
) -> None:
    job, place = replace(JOB, **changes), replace(ONE, gpu=gpu)
    chosen = plan(job, place)
    layout = chosen.layout
    assert layout.activation_checkpointing
    assert (layout.recompute, layout.recompute_every) != ("full", 1)
    assert chosen.prediction.memory.fits
    assert not chosen.prediction.memory.tight
    alternatives = [("full", 1), ("selective", 1), ("full", 2), ("full", 4)]
    rates = []
    for what, every in alternatives:
        with contextlib.suppress(CannotFit):
            other = plan(replace(job, recompute=what, recompute_every=every), place)  # type: ignore[arg-type]
            rates.append(other.prediction.tokens_per_second or 0.0)
    assert len(rates) >= 2
    assert (chosen.prediction.tokens_per_second or 0.0) >= max(rates)
    [line] = [line for line in chosen.why if line.startswith("activation checkpointing")]
    assert f"{layout.checkpointing}: " in line
    assert "faster than full; without it this micro batch needs" in line
    assert f"checkpointing {layout.checkpointing}" in " ".join(render(chosen, 300).split())
    assert "recompute" not in run_command(chosen, job, "llama-8b", None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"recompute": "full"}, ("full", 1)),
        ({"recompute": "selective"}, ("selective", 1)),
        ({"recompute_every": 3}, ("full", 3)),
        ({"activation_checkpointing": True}, ("full", 1)),
        ({"engine": "torchtune"}, ("full", 1)),
        ({"engine": "torchtitan"}, ("full", 1)),
    ],
)
def test_a_user_value_or_an_engine_without_the_choice_fixes_recomputation(
    changes: dict[str, Any], expected: tuple[str, int]
) -> None:
    chosen = plan(replace(JOB, **changes), replace(ONE, gpu="RTX A6000"))
    assert (chosen.layout.recompute, chosen.layout.recompute_every) == expected


def test_the_first_retry_recomputes_complete_blocks() -> None:
    chosen = plan(JOB, ONE)
    following = after_out_of_memory(chosen, JOB, attempt=0)
    assert following is not None
    assert following.plan.layout == replace(chosen.layout, recompute="full", recompute_every=1)
    assert following.change.startswith("recompute")


def test_checkpointing_is_off_if_the_memory_suffices() -> None:
    chosen = plan(JOB, replace(ONE, gpu="H200 SXM"))
    assert chosen.layout.checkpointing == "off"
