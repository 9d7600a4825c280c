"""Distributions of packaged modules, looked up without reading every file list."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from decorators._metaflow.code_packages import _contains, _Distributions

NAMES = ("pytest", "metaflow", "yaml", "_pytest", "psutil", "typing_extensions", "no_such_module")


@pytest.mark.slow
def test_distributions_of_a_module_equal_those_found_by_importlib() -> None:
    expected = metadata.packages_distributions()
    for name in NAMES:
        names = {each.metadata["Name"] for each in _Distributions().get(name)}
        assert names == set(expected.get(name, ())), name


@pytest.mark.parametrize(
    ("files", "contained"),
    [
        ({"top_level.txt": "own\nother\n", "RECORD": "else/x.py,,\n"}, True),
        ({"top_level.txt": "other\n", "RECORD": "own/x.py,,\n"}, False),
        ({"RECORD": "own/x.py,,\n"}, True),
        ({"RECORD": "a/x.py,,\nown/x.py,,\n"}, True),
        ({"RECORD": "a/x.py,,\nown.py,,\n"}, True),
        ({"RECORD": "its-own/x.py,,\nown_2.py,,\n"}, False),
        ({}, False),
    ],
)
def test_a_distribution_contains_its_declared_or_else_its_recorded_modules(
    files: dict[str, str], contained: bool
) -> None:
    distribution: Any = SimpleNamespace(read_text=files.get)
    assert _contains(distribution, "own") is contained
