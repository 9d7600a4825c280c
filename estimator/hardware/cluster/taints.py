"""Taints of nodes, and the tolerations that open them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.hardware.cluster import tables

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
    for key_pattern, value_pattern in tables.gpu_taints():
        if re.fullmatch(key_pattern, key) and re.fullmatch(value_pattern, value):
            return Toleration(key=key, effect=effect, value=value or None)
    return None


def fence(
    taints: Iterable[str], own: Iterable[Toleration] = (), *, of_table: bool = True
) -> tuple[tuple[Toleration, ...], tuple[str, ...]]:
    """(what pods must be given to stand on nodes with these taints, the taints that still keep them away).

    ``own``: tolerations that the pods have; ``of_table``: they get those of the table of GPU taints.
    """
    added: list[Toleration] = []
    closed: list[str] = []
    for taint in taints:
        key, value, effect = parts(taint)
        if effect not in BLOCKING or any(item.covers(key, value, effect) for item in own):
            continue
        toleration = tolerated(taint) if of_table else None
        if toleration is None:
            closed.append(taint)
        else:
            added.append(toleration)
    return tuple(dict.fromkeys(added)), tuple(closed)


def opening(taints: Iterable[str]) -> str:
    """The option of a flow by which its pods tolerate these taints, as a shell takes it."""
    tolerations = []
    for taint in taints:
        key, value, effect = parts(taint)
        tolerations.append(Toleration(key=key, effect=effect, value=value or None).to_dict())
    listed = json.dumps(tolerations, separators=(",", ":"))
    return f"--with {shlex.quote(f'kubernetes:tolerations={listed}')}"


def taint_text(taint: Mapping[str, Any]) -> str:
    """A taint as the API server tells it, as key=value:effect."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def is_of_table(toleration: Toleration) -> bool:
    """Whether the table of taints would tolerate the same."""
    return tolerated(f"{toleration.key}={toleration.value or ''}:{toleration.effect}") is not None


def parts(taint: str) -> tuple[str, str, str]:
    """(key, value, effect) of key=value:effect; the value may be left out."""
    pair, _, effect = taint.rpartition(":")
    key, _, value = pair.partition("=")
    return key, value, effect
