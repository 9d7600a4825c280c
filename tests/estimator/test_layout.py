"""A file's test is found by its path: tests/estimator/memory/test_states.py is of memory/states.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import estimator

TESTS, PACKAGE = Path(__file__).parent, Path(estimator.__file__).parent
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if path != Path(__file__))


@pytest.mark.parametrize("file", FILES)
def test_a_test_file_is_named_after_a_module_its_package_or_what_that_exports(file: str) -> None:
    """A word may follow: test_plan_from_cluster.py is of cli/plan.py. test_docs.py is of a page of docs/."""
    folder = Path(file).parent
    modules = {path.stem for path in (PACKAGE / folder).glob("*.py")} | {(PACKAGE / folder).name, "docs"}
    package = importlib.import_module(".".join(("estimator", *folder.parts)))
    words = Path(file).stem.removeprefix("test_").split("_")
    names = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    assert names & modules or names & set(dir(package))
