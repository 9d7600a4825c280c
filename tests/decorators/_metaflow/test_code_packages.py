"""Distributions of packaged modules, looked up without reading every file list."""

from __future__ import annotations

from importlib import metadata

import pytest

from decorators._metaflow.code_packages import _Distributions

NAMES = ("pytest", "metaflow", "yaml", "_pytest", "psutil", "typing_extensions", "no_such_module")


@pytest.mark.slow
def test_a_module_has_the_distributions_that_python_finds_for_it() -> None:
    expected = metadata.packages_distributions()
    for name in NAMES:
        found = {each.metadata["Name"] for each in _Distributions().get(name)}
        assert found == set(expected.get(name, ())), name
