"""Tables are complete, records agree with what engines refuse, and no other module lists the names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from estimator import models, vocabulary
from estimator.engines.support import unsupported
from estimator.job import Job
from estimator.vocabulary import (
    AUTOMATIC_METHODS,
    ENGINES,
    LAUNCHED_ENGINES,
    LAUNCHED_METHODS,
    LAUNCHED_OPTIMIZERS,
    METHODS,
    OPTIMIZERS,
    SHARDINGS,
    TASKS,
)

ROOT = Path(__file__).parents[2]
PRODUCT = ("estimator", "launchers", "decorators", "checklist", "flows", "metaflow_extensions", "infra")
KINDS = {
    "method": set(METHODS),
    "task": set(TASKS),
    "optimizer": set(OPTIMIZERS),
    "engine": set(ENGINES),
    "sharding": set(SHARDINGS),
    "precision": set(get_args(vocabulary.Precision)),
    "quantization": set(get_args(vocabulary.Quantization)),
    "checkpointing": set(get_args(vocabulary.Checkpointing)),
    "loss": set(get_args(vocabulary.LossKind)),
    "schedule": set(get_args(vocabulary.Schedule)),
    "target": set(get_args(vocabulary.TargetKind)),
}
ALLOWED = {
    ("estimator/cli/breakdown.py", "engine"): "bars that --over draws where no values are given",
    ("estimator/cli/breakdown.py", "sharding"): "the same",
    ("estimator/cli/breakdown.py", "optimizer"): "the same",
    ("estimator/cli/breakdown.py", "precision"): "the same",
    ("estimator/cli/breakdown.py", "loss"): "the same",
    ("estimator/planning/report.py", "target"): "a phrase for each place",
    ("estimator/throughput/flops.py", "checkpointing"): "bytes of a published formula for each",
    ("estimator/trainer_arguments.py", "optimizer"): "names of other trainers",
    ("estimator/trainer_arguments.py", "precision"): "the same",
    ("launchers/settings/conversion_rules.py", "task"): "names in other tools' files",
    ("launchers/settings/conversion_rules.py", "optimizer"): "the same",
    ("launchers/settings/conversion_rules.py", "method"): "the same",
    ("decorators/_metaflow/commands.py", "target"): "names of Metaflow's decorators",
}
FEW = 3


def test_each_name_type_matches_the_order_of_its_table() -> None:
    assert [name for name in METHODS if name in LAUNCHED_METHODS] == list(LAUNCHED_METHODS)
    assert tuple(TASKS) == get_args(vocabulary.Task)
    assert tuple(OPTIMIZERS) == get_args(vocabulary.Optimizer)
    assert tuple(SHARDINGS) == get_args(vocabulary.Sharding)
    assert tuple(name for name in ENGINES if ENGINES[name].defaults) == get_args(vocabulary.Engine)
    assert set(ENGINES) == {*get_args(vocabulary.Engine), *vocabulary.PLANNED_ENGINES}


def test_a_method_without_quantization_is_its_own_base() -> None:
    assert {spec.base for spec in METHODS.values()} == set(get_args(vocabulary.Method))
    assert all(METHODS[name].base == name for name in METHODS if not METHODS[name].quantized)
    assert AUTOMATIC_METHODS == ("full", "lora", "qlora")


@pytest.mark.parametrize("engine", LAUNCHED_ENGINES)
def test_engine_support_matches_its_record(engine: str) -> None:
    """Every task, method and optimizer of the record is accepted with some settings, and no other."""
    spec = ENGINES[engine]
    accepted = [
        (task, method, optimizer)
        for model, task, method, optimizer, in_backward in product(
            (models.find("llama-8b"), models.resolve("stable-diffusion-xl").spec),
            TASKS,
            LAUNCHED_METHODS,
            LAUNCHED_OPTIMIZERS,
            (False, True),
        )
        if unsupported(
            engine,
            Job(
                model=model,
                engine="auto",
                task=task,
                method=method,
                optimizer=optimizer,
                optimizer_in_backward=in_backward,
                precision="bf16",
                seq_len=64,
            ),
        )
        is None
    ]
    for names, of_record in zip(
        zip(*accepted, strict=True), (spec.tasks, spec.methods, spec.optimizers), strict=True
    ):
        assert set(names) == set(of_record)


def test_names_are_listed_in_the_vocabulary_only() -> None:
    found = {
        (str(file.relative_to(ROOT)), kind)
        for package in PRODUCT
        for file in sorted((ROOT / package).rglob("*.py"))
        if file != ROOT / "estimator" / "vocabulary.py"
        for text in (file.read_text(),)
        if sum(f'"{name}"' in text for name in set().union(*KINDS.values())) >= FEW  # parsing takes long
        for kind in _listed_kinds(ast.parse(text))
    }
    assert found == set(ALLOWED), "derive it from estimator/vocabulary.py"


def _listed_kinds(tree: ast.AST) -> Iterator[str]:
    """The kinds of which a tuple, list, set, Literal or dictionary has several names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            members: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            members = node.keys
        else:
            continue
        names = {each.value for each in members if isinstance(each, ast.Constant)}
        yield from (kind for kind, known in KINDS.items() if len(names & known) >= FEW)
