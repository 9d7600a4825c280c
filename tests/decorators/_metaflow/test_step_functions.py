"""Jobs of a state machine that AWS Batch would refuse."""

from __future__ import annotations

import pytest

from decorators._metaflow import FinetuneError
from decorators._metaflow.step_functions import _check_length


def test_a_step_with_too_long_overrides_is_refused_by_name() -> None:
    overrides = {"Command": ["bash", "-c", "true"], "Environment": [{"Name": "NOTES", "Value": "x" * 8192}]}
    with pytest.raises(FinetuneError, match=r"Step train cannot be deployed.* 8192"):
        _check_length("train", overrides)
    _check_length("train", overrides | {"Environment": []})
    _check_length("split", None)  # a state without a job
