"""The common interface of all backends."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from decorators._metaflow import Backend, UserValue
from decorators.backends.interface import StepRequest
from decorators.backends.registry import BACKENDS
from estimator.errors import UserError
from tests.decorators.backends.plans import planned

REQUEST = planned("llama-8b", "lora", "L40S", 1).request


def _step_request(backend: Backend = "batch", **user_values: Any) -> StepRequest:
    values = {name: UserValue(value=value, by=f"--with batch:{name}=") for name, value in user_values.items()}
    return StepRequest(backend=backend, request=REQUEST, user_values=values)


def test_every_remote_backend_of_metaflow_is_listed() -> None:
    assert set(BACKENDS) == set(get_args(Backend)) - {"local"}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_size_set_by_the_user_is_kept_on_every_backend(backend: Any) -> None:
    values = BACKENDS[backend].values_for(
        _step_request(backend, memory="5000", cpu="1.5", shared_memory="64")
    )
    assert (values.resources["memory"], values.resources["cpu"]) == (5000, 1.5)
    assert (values.resources["shared_memory"], values.resources["gpu"]) == (64, REQUEST.gpus_per_node)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_size_that_is_not_a_number_is_named_in_one_line(backend: Any) -> None:
    with pytest.raises(UserError, match="--with batch:memory: memory='lots' must be a number") as caught:
        BACKENDS[backend].values_for(_step_request(backend, memory="lots"))
    assert caught.value.advice == "Write memory=8, for example."
