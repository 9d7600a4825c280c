"""What a flow without a plan writes into its steps' decorators."""

from __future__ import annotations

from typing import Any

from decorators._metaflow import Given
from decorators.node_request import Asked, _request
from estimator.plan import Request

P5 = Request(
    nodes=4,
    gpus_per_node=8,
    gpu="H100 SXM",
    cpu=32,
    memory_mib=73_728,
    shared_memory_mib=8192,
    disk_mib=10_240,
    instance_type="p5.48xlarge",
)


class _Step:
    """A step that remembers what is written into its decorators."""

    def __init__(self, backend: str, **given: Any) -> None:
        self._backend = backend
        self._given = {name: Given(value=value, by="--with") for name, value in given.items()}
        self.written: dict[str, dict[str, Any]] = {}

    def given(self, decorator: str) -> dict[str, Given]:
        return self._given if decorator == self._backend else {}

    def values(self, decorator: str) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def has(self, decorator: str) -> bool:
        return decorator == self._backend

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        self.written[decorator] = values


def _written(backend: Any, **given: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    step = _Step(backend, **given)
    sizes = {name: value for name, value in step.given(backend).items() if name != "queue"}
    extra = _request(step, Asked(request=P5, launch=""), backend, sizes)  # type: ignore[arg-type]
    return step.written, extra


def test_batch_is_asked_for_gpus_shared_memory_and_the_fabric() -> None:
    written, extra = _written("batch")
    assert written["resources"]["gpu"] == 8
    assert written["resources"]["shared_memory"] == 8192
    assert written["batch"]["efa"] == 32
    assert extra["FI_PROVIDER"] == "efa"


def test_kubernetes_is_asked_for_gpus_shared_memory_and_the_fabric() -> None:
    written, extra = _written("kubernetes")
    assert written["resources"]["gpu"] == 8
    assert written["resources"]["shared_memory"] == 8192
    assert written["kubernetes"]["extended_resources"]["vpc.amazonaws.com/efa"] == "32"
    assert extra["FI_PROVIDER"] == "efa"


def test_what_the_user_has_written_stands() -> None:
    written, _ = _written("batch", gpu="4", memory="9000", queue="mine", efa="0")
    assert (written["resources"]["gpu"], written["resources"]["memory"]) == ("4", "9000")
    assert written["resources"]["shared_memory"] == 8192
    assert "queue" not in written["batch"]
    assert "efa" not in written["batch"]
