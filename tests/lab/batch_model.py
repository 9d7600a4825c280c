"""Validation of AWS Batch requests: the botocore model, and limits documented in its user guide."""

from __future__ import annotations

import functools
import json
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator

# AWS Batch user guide, "Service quotas" and "Job definition parameters".
MAX_CHARACTERS = 8192  # of the container overrides of one node, as JSON
RESERVED = "AWS_BATCH"  # no variable of a job may begin so


class Invalid(Exception):  # noqa: N818
    """A request refused by Batch, with its message."""


@functools.lru_cache(maxsize=1)
def _model() -> ServiceModel:
    return botocore.session.get_session().get_service_model("batch")


def operation_of(path: str) -> str:
    """Return the operation with that address."""
    for name in _model().operation_names:
        if _model().operation_model(name).http["requestUri"] == path:
            return str(name)
    raise Invalid(f"{path}: no such operation")


def check_request(operation: str, body: dict[str, Any]) -> None:
    """Validate a request; raises Invalid."""
    _check(body, _model().operation_model(operation).input_shape)
    for override in _overrides(body):
        size = len(json.dumps(override, separators=(",", ":")))
        if size > MAX_CHARACTERS:
            raise Invalid(f"Container Overrides length must be at most {MAX_CHARACTERS}, it is {size}")
        for variable in override.get("environment", []):
            if variable["name"].startswith(RESERVED):
                raise Invalid(f"environment variable {variable['name']}: {RESERVED} is reserved")


def check_response(operation: str, body: dict[str, Any]) -> None:
    """Validate a response of this simulation; raises Invalid."""
    _check(body, _model().operation_model(operation).output_shape)


def _overrides(body: dict[str, Any]) -> list[dict[str, Any]]:
    nodes = body.get("nodeOverrides", {}).get("nodePropertyOverrides", [])
    return [body.get("containerOverrides", {}), *(node["containerOverrides"] for node in nodes)]


def _check(value: Any, shape: Shape) -> None:
    report = ParamValidator().validate(value, shape)
    if report.has_errors():
        raise Invalid(report.generate_report())
    if unlisted := _unlisted(value, shape, shape.name):
        raise Invalid("; ".join(unlisted))


def _unlisted(value: Any, shape: Shape, section: str) -> list[str]:
    """Return enumeration values missing in the model, which botocore does not validate."""
    if isinstance(shape, StructureShape):
        members = [(name, value[name], shape.members[name]) for name in value]
        return [each for name, item, kind in members for each in _unlisted(item, kind, f"{section}.{name}")]
    if isinstance(shape, ListShape):
        return [each for item in value for each in _unlisted(item, shape.member, section)]
    if isinstance(shape, MapShape):
        return [each for item in value.values() for each in _unlisted(item, shape.value, section)]
    if isinstance(shape, StringShape) and shape.enum and value not in shape.enum:
        return [f"{section}: {value!r} is none of {', '.join(shape.enum)}"]
    return []
