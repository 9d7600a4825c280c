"""Run configurations for tests below the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.models import find
from launchers import run_config
from launchers.run_config import RunConfig
from launchers.settings import build


def config(values: Mapping[str, Any] | None = None, model: str = "tiny-llama") -> RunConfig:
    """Return the configuration for these settings as a plan would set it; ``auto`` is full by torchtune."""
    settings = build(values or {})
    method = "full" if settings.method == "auto" else settings.method
    engine = "torchtune" if settings.engine == "auto" else settings.engine
    return run_config.resolve(settings, find(model), method=method, engine=engine)
