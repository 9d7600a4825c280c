"""Quantities of Kubernetes: "500m", "96Gi", "1e3"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from estimator.errors import UserError
from estimator.formatting import GIB

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d+)|([KMGTPE]i|[numkMGTPE]))?")
_MAX_LENGTH = 100  # characters of an amount
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}  # powers of ten
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}  # powers of 1024


def quantity(text: str | float) -> float:
    """Parse a quantity in its base unit: bytes, cores, counts.

    Format: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/. Raises
    UserError for anything else.
    """
    match = _NUMBER.fullmatch(str(text).strip()[: _MAX_LENGTH + 1])
    if match is None or len(match[0]) > _MAX_LENGTH:
        raise _invalid(text)
    number, exponent, unit = match.groups()
    if unit in _BINARY:
        return float(number) * 1024.0 ** _BINARY[unit]
    # Parsed as a decimal literal, so that 100m equals 0.1
    amount = float(f"{number}e{_DECIMAL[unit] if unit else exponent or 0}")
    if math.isinf(amount):
        raise _invalid(text)
    return amount


def _invalid(text: object) -> UserError:
    return UserError(
        f"The cluster reports an amount of {str(text)[:_MAX_LENGTH]!r}, which is not a Kubernetes quantity.",
        "Write an amount such as 500m, 16 or 96Gi in the object that has it (node, pod, quota or queue).",
    )


def format_amount(resource: str, amount: float) -> str:
    """Format an amount as a Kubernetes quantity: "24Gi" for memory and disk, "16" for others."""
    is_bytes = resource.endswith(("memory", "ephemeral-storage"))
    return f"{amount / GIB:.0f}Gi" if is_bytes else f"{amount:g}"


def quantities(table: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert quantities by resource, such as a container's requests."""
    return {name: quantity(value) for name, value in (table or {}).items()}
