"""Every engine by every method and task on tiny-llama: the cells of docs/support.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.launchers.engines import methods
from tests.launchers.engines.methods import Cell, Proof
from tests.optional import require_torchtune

# A cell of two nodes runs that of one node too; benchmarks/support_table.py proves the others of the tables.
CELLS = [cell for cell in methods.CELLS if cell.nodes == 1 or cell.method in methods.TASK_METHODS]
METHOD_OF = {"torchtune": "lora", "deepspeed": "full", "fsdp2": "lora", "trl": "lora"}
TASK_CELLS = [
    cell
    for cell in methods.TASK_CELLS
    if cell.nodes == 2 and cell.method in (METHOD_OF[cell.engine], "qlora nf4-double" * (cell.task == "dpo"))
    # That the loop packs: deepspeed/test_sharding.py, loop/test_families.py
    if (cell.task, cell.engine) not in (("pretrain", "deepspeed"), ("pretrain", "fsdp2"))
]
# The loop's tasks are compared with TRL's in loop/test_tasks.py
LOOP = ("deepspeed", "fsdp2")
COMMON = [
    *(
        cell
        for cell in CELLS
        if (cell.engine, cell.method, cell.nodes)
        in (
            ("torchtune", "full", 2),
            ("torchtune", "qlora nf4", 1),
            ("deepspeed", "lora", 2),
            ("deepspeed", "qlora nf4", 1),
            ("fsdp2", "full", 2),
            ("fsdp2", "lora", 1),
            ("fsdp2", "adapter-v1", 1),
            ("deepspeed", "adapter-v2", 1),
        )
    ),
    *(cell for cell in TASK_CELLS if cell.engine not in LOOP and cell.task != "pretrain"),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("methods")
    methods.make(place)
    return place


@pytest.fixture(scope="module")
def proved(folder: Path) -> Callable[[Cell], Proof]:
    """The runs of a cell, done once."""
    return cache(lambda cell: methods.prove(folder, cell))


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if cell in COMMON else [pytest.mark.nightly])
        for cell in [*CELLS, *TASK_CELLS]
    ],
    ids=lambda cell: cell.name,
)
def test_a_method_learns_resumes_bit_by_bit_and_exports_the_trained_weights(
    tmp_path: Path, folder: Path, cell: Cell, proved: Callable[[Cell], Proof]
) -> None:
    if cell.engine == "torchtune":
        require_torchtune()
    if cell.engine == "trl":
        pytest.importorskip("trl", reason="TRL is not installed here")
    clause = methods.refusal(folder, cell)
    if clause is not None:
        assert any(name in clause for name in (cell.engine, cell.method.split()[0], cell.task))
        return
    one = cell if cell.task == "grpo" else dataclasses.replace(cell, nodes=1)
    assert methods.problems(proved(cell), proved(one), tmp_path) == []
