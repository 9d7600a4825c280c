"""Each engine's defaults."""

from __future__ import annotations

import pytest

from estimator import memory
from estimator.cli.defaults import ENGINES
from estimator.setup import Engine
from tests.estimator.cli.estimates import setup


@pytest.mark.parametrize("engine", Engine.__args__)  # type: ignore[attr-defined]
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora", "qdora"])
def test_every_engine_has_defaults_that_make_a_setup(engine: str, method: str) -> None:
    assert ENGINES[engine].source
    for gpus in (1, 8):
        made = setup(gpus, engine=engine, method=method)
        assert made.world_size == gpus
        assert memory.estimate(made).needs_bytes > 0
