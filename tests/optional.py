"""Import optional packages in tests as the product does, or skip the test."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def require_torchtune() -> None:
    """Import torchtune like the engine; skip the test if it is not installed."""
    if find_spec("torchtune") is None:
        pytest.skip("torchtune is not installed here", allow_module_level=True)
    from estimator.exact.torchtune_imports import torchtune_imports

    with torchtune_imports():
        import torchtune.training  # noqa: F401
