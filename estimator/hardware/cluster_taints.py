"""Taints of nodes, and the tolerations that open them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from estimator.hardware import cluster_tables

BLOCKING = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint of nodes that a pod may stand on."""

    key: str  # empty: any
    effect: str  # "NoSchedule" or "NoExecute"; empty: any
    value: str | None = None  # None: any

    @classmethod
    def of(cls, item: Mapping[str, str]) -> Toleration:
        """Read a toleration as a pod's specification writes it."""
        value = None if item.get("operator") == "Exists" else item.get("value") or ""
        return cls(key=item.get("key") or "", effect=item.get("effect") or "", value=value)

    def covers(self, key: str, value: str, effect: str) -> bool:
        """Whether a pod with this toleration may stand on a node with that taint."""
        return self.key in ("", key) and self.effect in ("", effect) and self.value in (None, value)

    def to_dict(self) -> dict[str, str]:
        """The toleration as a pod's specification has it."""
        toleration = {
            "key": self.key,
            "operator": "Exists" if self.value is None else "Equal",
            "effect": self.effect,
        }
        return toleration if self.value is None else {**toleration, "value": self.value}


def tolerated(taint: str) -> Toleration | None:
    """The toleration of a taint that marks nodes with GPUs, by the table; None for any other fence."""
    key, value, effect = parts(taint)
    for key_pattern, value_pattern in cluster_tables.gpu_taints():
        if re.fullmatch(key_pattern, key) and re.fullmatch(value_pattern, value):
            return Toleration(key=key, effect=effect, value=value or None)
    return None


def is_of_table(toleration: Toleration) -> bool:
    """Whether the table of taints would tolerate the same."""
    return tolerated(f"{toleration.key}={toleration.value or ''}:{toleration.effect}") is not None


def parts(taint: str) -> tuple[str, str, str]:
    """(key, value, effect) of key=value:effect; the value may be left out."""
    pair, _, effect = taint.rpartition(":")
    key, _, value = pair.partition("=")
    return key, value, effect
