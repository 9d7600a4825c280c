"""Options in advice: as ``--set`` takes them; never spelled for one front door in what several use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from estimator.changes import FINETUNE, Change
from launchers.settings import dotted_names
from launchers.settings.spelling import SET

ROOT = Path(__file__).parents[3]
FLAGS = {FINETUNE.name(name) for name in dotted_names()} - {
    "--gpus"
}  # which srun and finetune gpus have, too
# Each of these is one front door itself, or says how it spells.
OWN_WORDS = (
    "estimator/cli",
    "estimator/changes.py",
    # Clusters, goals, chat and serve: `finetune` alone has them, whose commands share one set of names
    "estimator/hardware/cluster/machines.py",
    "estimator/planning/places.py",
    "estimator/planning/ranking.py",
    "launchers/inference",
    "launchers/__main__.py",
    "launchers/settings/spelling.py",
    "launchers/run/worker.py",
)
SHARED = [
    str(path.relative_to(ROOT))
    for package in ("estimator", "launchers")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not str(path.relative_to(ROOT)).startswith(OWN_WORDS)
]


def test_a_change_is_a_word_that_yaml_reads_back() -> None:
    assert SET.words(Change("zero.stage", 3)) == ("--set", "zero.stage=3")
    assert SET.words(Change("packing", True)) == ("--set", "packing=true")


@pytest.mark.parametrize("file", SHARED)
def test_what_several_front_doors_use_names_no_option_as_one_of_them_does(file: str) -> None:
    """A whole command (``finetune estimate --model x``) is what it is; an option alone is a Change."""
    texts = [
        node.value
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    sentences = [text for text in texts if " " in text and "finetune " not in text]
    named = {word for text in sentences for word in re.findall(r"--[a-z][\w-]*", text)}
    assert not FLAGS & named
