"""Compiled blocks with the ZeRO stages that leave weights whole, and their eager code as fallback."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from estimator.engines.automatic import COMPILED
from estimator.errors import UserError
from launchers import engines
from launchers.engines.loop.compiled import Compilation
from launchers.gang.job import TrainJob
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import families, runs
from tests.launchers.engines.loop.test_self_check import warnings_of

STEPS = 3


def train_with_traced_blocks(job: TrainJob) -> None:
    """Train a rank with torch.compile's graphs, but without generating code for them.

    Fails if nothing was compiled, or if hooks break a block's graph.
    """
    if job.settings.compile:
        torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    engines.get(job.plan.engine).train(job)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == job.settings.compile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "method", "checkpointing", "world", "family"),
    [
        (2, "full", True, 2, "llama"),
        (0, "full", False, 1, "qwen3"),  # what a plan for one GPU has
        *(
            pytest.param(*cell, "llama", marks=pytest.mark.nightly)
            for cell in ((0, "full", False, 2), (1, "lora", True, 2), (2, "qlora", True, 2))
        ),
        *(
            pytest.param(*cell, 1, family, marks=pytest.mark.nightly)
            for family, cell in zip(
                COMPILED,
                itertools.cycle([(0, "full", True), (1, "lora", False), (2, "full", False)]),
                strict=False,
            )
        ),
    ],
)
def test_compiled_blocks_have_the_losses_of_eager_ones(
    tmp_path: Path, stage: int, method: str, checkpointing: bool, world: int, family: str
) -> None:
    model = tmp_path / "model"
    families.network(family, **families.repeated(family)).save_pretrained(model)
    documents = runs.documents(8)
    rows = [runs.joined(documents[i : i + 2]) for i in range(0, 8, 2)]
    data = runs.make_data(tmp_path / "data", rows, batch=4, steps=STEPS)
    losses = []
    for compiled in (False, True):
        job = runs.make_job(
            tmp_path / str(compiled),
            model,
            data,
            steps=STEPS,
            world=world,
            micro=1,
            accumulation=4 // world,
            precision="fp32" if world > 1 else "bf16-mixed",
            sharding=f"zero{stage}",
            activation_checkpointing=checkpointing,
            settings={"method": method, "compile": compiled},
        )
        done = ranks.train([job], limit_s=200, entry=f"{__name__}:{train_with_traced_blocks.__name__}")
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(runs.losses(runs.steps(job)))
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[0][-1] < losses[0][0]


class CompilerError(Exception):
    """Error of the test's compiler."""


def failing(*_: Any) -> Any:
    raise CompilerError("ptxas: no such file")


def backward_compiler(graph: Any, example: Any) -> Any:
    return failing() if any("tangents" in node.name for node in graph.graph.nodes) else graph.forward


BACKENDS: dict[str, Callable[..., Any]] = {
    "forward": failing,
    "backward": aot_autograd(fw_compiler=backward_compiler, bw_compiler=backward_compiler),
    "first call of a kernel": lambda *_: failing,
}


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    torch._dynamo.reset()
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(compile_function, backend=BACKENDS[name]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_runs_eager_if_the_compiler_fails(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, backend)
    compilation, layer = Compilation(required=False), torch.nn.Linear(2, 2)
    block = compilation.compiled(layer.forward)
    inputs = torch.ones(3, 2, requires_grad=True)
    for _ in range(2):
        inputs.grad = None
        block(inputs).sum().backward()
        assert inputs.grad is not None
        assert torch.equal(inputs.grad, layer.weight.sum(0).expand(3, 2))
    assert "ptxas" in str(compilation.fault)


def test_a_required_compiler_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "forward")
    block = Compilation(required=True).compiled(torch.nn.Linear(2, 2).forward)
    with pytest.raises(UserError, match=r"compile: torch\.compile failed"):
        block(torch.ones(3, 2))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("of the model")])
def test_errors_of_the_model_and_missing_memory_are_no_faults_of_the_compiler(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward() -> None:
        raise error

    monkeypatch.setattr(torch, "compile", lambda function: function)
    compilation = Compilation(required=False)
    with pytest.raises(type(error)):
        compilation.compiled(forward)()
    assert compilation.fault is None


def train_with_failing_compiler(job: TrainJob) -> None:
    torch.compile = functools.partial(torch.compile, backend=failing)  # type: ignore[assignment]
    engines.get(job.plan.engine).train(job)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "sharding"), [("fsdp2", "fsdp"), ("deepspeed", "zero2")])
def test_a_run_whose_compiler_fails_has_the_losses_of_an_eager_one(
    tmp_path: Path, engine: str, sharding: str
) -> None:
    model = runs.make_model(tmp_path / "model")
    data = runs.make_data(tmp_path / "data", runs.documents(4), batch=2, steps=STEPS)
    losses = []
    for compiled in (False, True):
        job = runs.make_job(
            tmp_path / str(compiled),
            model,
            data,
            steps=STEPS,
            micro=1,
            engine=engine,
            sharding=sharding,
            activation_checkpointing=True,
            settings={"compile": compiled},
        )
        settings = job.settings.model_copy(update={"automatic_choices": ("compile",)})
        job = dataclasses.replace(job, settings=settings)
        done = ranks.train([job], limit_s=200, entry=f"{__name__}:{train_with_failing_compiler.__name__}")
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(runs.losses(runs.steps(job)))
        assert warnings_of(job).keys() == ({0, 1} if compiled else set())
    assert losses[1] == losses[0]
