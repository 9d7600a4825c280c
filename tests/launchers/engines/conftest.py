"""A small model and rows that six steps process three times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.engines.loop import runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_data(tmp_path_factory.mktemp("data"), runs.documents(8), batch=4, steps=6)
