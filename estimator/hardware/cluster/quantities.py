"""Amounts as Kubernetes writes them: "500m", "96Gi", "1e3"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from estimator.formatting import GIB

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d+)|([KMGTPE]i|[numkMGTPE]))?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}  # powers of ten
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}  # powers of 1024


def quantity(text: str | float) -> float:
    """An amount in its base unit: bytes, cores, pieces.

    The format: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/. Raises
    ValueError for anything else.
    """
    found = _NUMBER.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is not an amount as Kubernetes writes it")
    number, exponent, unit = found.groups()
    if unit in _BINARY:
        return float(number) * 1024.0 ** _BINARY[unit]
    # By Python's own reading of decimals, so that 100m is the same number as 0.1
    return float(f"{number}e{_DECIMAL[unit] if unit else exponent or 0}")


def format_amount(resource: str, amount: float) -> str:
    """Format an amount of a resource as Kubernetes writes it: "24Gi" of memory and disk, "16" of others."""
    in_bytes = resource.endswith(("memory", "ephemeral-storage"))
    return f"{amount / GIB:.0f}Gi" if in_bytes else f"{amount:g}"


def quantities(table: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert a table of amounts by resource, such as a container's requests."""
    return {name: quantity(value) for name, value in (table or {}).items()}
