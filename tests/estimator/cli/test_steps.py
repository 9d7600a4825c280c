"""Each engine's defaults."""

from __future__ import annotations

import pytest

from estimator import memory
from estimator.vocabulary import ENGINES, Engine
from tests.estimator.cli.estimates import setup


@pytest.mark.parametrize("engine", Engine.__args__)  # type: ignore[attr-defined]
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora", "qdora"])
def test_the_defaults_of_every_engine_make_a_valid_setup(engine: str, method: str) -> None:
    defaults = ENGINES[engine].defaults
    assert defaults is not None
    assert defaults.source
    for gpus in (1, 8):
        step_setup = setup(gpus, engine=engine, method=method)
        assert step_setup.world_size == gpus
        assert memory.estimate(step_setup).needs_bytes > 0
