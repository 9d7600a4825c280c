"""Comparison of kernels before the first step, and the fallback of all ranks, with references on CPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from estimator import models
from estimator.engines.varlen import FAMILIES
from estimator.errors import UserError
from launchers import engines
from launchers.dataset import batches
from launchers.dataset.batches import collate
from launchers.engines.loop import liger, self_check, varlen
from launchers.engines.loop.self_check import AttentionShape, attention_errors, attention_shapes
from launchers.gang.job import TrainJob
from launchers.report import telemetry
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs, varlen_kernel, varlen_models

CPU = torch.device("cpu")
SHAPES = (
    AttentionShape(heads=4, key_heads=2, width=16, value_width=16),
    AttentionShape(heads=4, key_heads=2, width=16, value_width=16, sinks=True, window=32),
    AttentionShape(heads=2, key_heads=2, width=24, value_width=16),
    AttentionShape(heads=2, key_heads=1, width=264, value_width=264),
)
STEPS = 3


@pytest.fixture
def _kernel() -> Iterator[None]:
    with varlen_kernel.registered():
        yield


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_correct_kernel_is_within_the_tolerance(shape: AttentionShape, dtype: torch.dtype) -> None:
    errors = attention_errors(shape, CPU, dtype)
    assert len(errors) == 4 + shape.sinks
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else self_check.TOLERANCE)


def without_window(*arguments: Any) -> Any:
    scale = arguments[8]
    return FORWARD(*arguments[:7], True, scale, (-1, 0), *arguments[10:])


def doubled(*arguments: Any, **options: Any) -> Any:
    output, *others = FORWARD(*arguments, **options)
    return output * 2, *others


def without_key_gradient(*arguments: Any, **options: Any) -> Any:
    of_query, of_key, of_value = BACKWARD(*arguments, **options)
    return of_query, torch.zeros_like(of_key), of_value


def not_a_number(*arguments: Any, **options: Any) -> Any:
    output, *others = FORWARD(*arguments, **options)
    return output * float("nan"), *others


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


FORWARD, BACKWARD = varlen_kernel.forward, varlen_kernel.backward
BROKEN = {
    "doubled": ("forward", doubled),
    "nan": ("forward", not_a_number),
    "raises": ("forward", raising),
    "key gradient": ("backward", without_key_gradient),
    "raises in backward": ("backward", raising),
}


def placed_on_gpus(job: TrainJob) -> bool:
    """Take the place of varlen.applies: the kernels' references run on CPUs."""
    return job.settings.variable_length is not False


def job_of(tmp_path: Path, **settings: Any) -> TrainJob:
    rows = [runs.joined(runs.documents(3, seed=number)) for number in range(4)]
    model = runs.make_model(tmp_path / "model")
    data = runs.make_data(tmp_path / "data", rows, batch=2, steps=STEPS)
    automatic = settings.pop("automatic_choices", ())
    world = settings.pop("world", 1)
    job = runs.make_job(
        tmp_path / "work",
        model,
        data,
        steps=STEPS,
        world=world,
        micro=2 // world,
        engine="fsdp2",
        sharding="none" if world == 1 else "fsdp",
        settings=settings,
    )
    return dataclasses.replace(job, settings=job.settings.model_copy(update={"automatic_choices": automatic}))


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_attention_kernel_is_replaced_by_the_mask_with_one_warning(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, function = BROKEN[broken]
    monkeypatch.setattr(varlen, "applies", placed_on_gpus)
    monkeypatch.setattr(varlen_kernel, name, function)
    job, warnings = job_of(tmp_path), list[str]()
    state = torch.get_rng_state()
    with varlen_kernel.registered():
        checked = self_check.checked(job, CPU, warnings.append)
    assert checked == dataclasses.replace(
        job, settings=job.settings.model_copy(update={"variable_length": False})
    )
    (warning,) = warnings
    assert warning.startswith("variable_length off: ")
    assert "--no-variable-length" in warning
    assert "\n" not in warning
    assert torch.equal(state, torch.get_rng_state())


def test_a_kernel_that_ignores_the_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_kernel, "forward", without_window)
    shape = AttentionShape(heads=2, key_heads=2, width=16, value_width=16, window=self_check.WINDOW)
    with varlen_kernel.registered():
        assert max(attention_errors(shape, CPU, torch.float32).values()) > self_check.TOLERANCE


@pytest.mark.parametrize("required", [False, True])
def test_a_required_kernel_that_fails_ends_the_run_with_two_lines(
    required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "applies", placed_on_gpus)
    monkeypatch.setattr(varlen_kernel, "forward", raising if required else FORWARD)
    job = job_of(tmp_path, variable_length=True)
    with varlen_kernel.registered():
        if not required:
            assert self_check.checked(job, CPU, pytest.fail) is job
            return
        with pytest.raises(UserError, match="variable_length: its kernel failed") as raised:
            self_check.checked(job, CPU, pytest.fail)
    assert "variable_length: false" in raised.value.advice


def torch_loss(hidden: Any, weight: Any, bias: Any, labels: Any, soft_cap: float | None) -> Any:
    assert soft_cap is None
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "passes"),
    [
        (torch_loss, True),
        (lambda hidden, *others: torch_loss(hidden, *others) / hidden.shape[0], False),
        (lambda hidden, *others: torch_loss(hidden.detach(), *others) + 0 * hidden.sum(), False),
        (raising, False),
    ],
    ids=["correct", "mean", "no gradient of the hidden states", "raises"],
)
def test_a_fused_loss_that_differs_from_torchs_is_not_used(
    loss: Callable[..., Any], passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "summed_cross_entropy", loss)
    job, warnings = job_of(tmp_path, liger=True, automatic_choices=("liger",)), list[str]()
    checked = self_check.checked(job, CPU, warnings.append)
    assert (checked.settings.liger, len(warnings)) == ((True, 0) if passes else (False, 1))
    explicit = job_of(tmp_path / "explicit", liger=True)
    if not passes:
        with pytest.raises(UserError, match="liger"):
            self_check.checked(explicit, CPU, warnings.append)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_checked_shapes_are_those_of_the_models_blocks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, called = varlen_models.network_of(family), set[AttentionShape]()
    network.save_pretrained(tmp_path)
    original = varlen.attention

    def recorded(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        window = options.get("sliding_window")
        called.add(
            AttentionShape(
                heads=query.shape[1],
                key_heads=key.shape[1],
                width=query.shape[-1],
                value_width=value.shape[-1],
                sinks=options.get("s_aux") is not None,
                window=None if window is None else min(window, self_check.WINDOW),
            )
        )
        return original(module, query, key, value, mask, **options)

    monkeypatch.setattr(varlen, "attention", recorded)
    varlen.use(network)
    network(**collate(varlen_models.packed_rows(), 0, batches.TOKEN_MULTIPLE).inputs, use_cache=False)
    assert set(attention_shapes(models.resolve(str(tmp_path)).spec)) == called


def train_with_references(job: TrainJob) -> None:
    """Train a rank with the references of the kernels; on rank 1 the forward pass raises."""
    forward = raising if os.environ["RANK"] == "1" else FORWARD
    with (
        mock.patch.object(varlen, "applies", placed_on_gpus),
        mock.patch.object(varlen_kernel, "forward", forward),
        varlen_kernel.registered(),
    ):
        engines.get(job.plan.engine).train(job)


def warnings_of(job: TrainJob) -> dict[int, list[str]]:
    """Return the warnings of a run's telemetry by rank."""
    found: dict[int, list[str]] = {}
    for event in telemetry.Follower(job.telemetry_dir).poll():
        if isinstance(event, telemetry.Warned):
            found.setdefault(event.rank, []).append(event.text)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_use_the_mask_if_the_kernel_fails_on_one(world: int, tmp_path: Path) -> None:
    losses = {}
    for kernel in (False, "auto"):
        job = job_of(tmp_path / str(kernel), variable_length=kernel, world=world)
        done = ranks.train([job], limit_s=200, entry=f"{__name__}:{train_with_references.__name__}")
        assert done.returncode == 0, done.stderr[-4000:]
        losses[kernel] = runs.losses(runs.steps(job))
        fell_back = kernel == "auto" and world == 2
        warned = warnings_of(job)
        assert warned.keys() == ({0, 1} if fell_back else set())
        assert all("on rank 1" in text for texts in warned.values() for text in texts)
    assert len(losses["auto"]) == STEPS
    assert losses["auto"] == pytest.approx(losses[False], rel=1e-5 if world == 1 else 0)
