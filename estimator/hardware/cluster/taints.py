"""Taints of nodes, and tolerations."""

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
    """Toleration of a pod."""

    key: str  # empty: any
    effect: str  # "NoSchedule" or "NoExecute"; empty: any
    value: str | None = None  # None: any

    @classmethod
    def of(cls, item: Mapping[str, str]) -> Toleration:
        """Parse a toleration of a pod specification."""
        value = None if item.get("operator") == "Exists" else item.get("value") or ""
        return cls(key=item.get("key") or "", effect=item.get("effect") or "", value=value)

    def covers(self, key: str, value: str, effect: str) -> bool:
        """Return whether this toleration matches a taint."""
        return self.key in ("", key) and self.effect in ("", effect) and self.value in (None, value)

    def to_dict(self) -> dict[str, str]:
        """Convert to the form of a pod specification."""
        toleration = {
            "key": self.key,
            "operator": "Exists" if self.value is None else "Equal",
            "effect": self.effect,
        }
        return toleration if self.value is None else {**toleration, "value": self.value}


def tolerated(taint: str) -> Toleration | None:
    """Return the toleration of a taint that marks GPU nodes, by the table; None for any other taint."""
    key, value, effect = parts(taint)
    for key_pattern, value_pattern in tables.gpu_taints():
        if re.fullmatch(key_pattern, key) and re.fullmatch(value_pattern, value):
            return Toleration(key=key, effect=effect, value=value or None)
    return None


def temporary_state(taint: str) -> str | None:
    """Return the node state of a temporary taint, e.g. "being removed (KEY)"; None for other taints.

    Pods never tolerate these taints, as e.g. a draining node would evict them.
    """
    key, _, effect = parts(taint)
    if effect not in BLOCKING:
        return None
    states = (state for pattern, state in tables.temporary_taints() if re.fullmatch(pattern, key))
    return next((f"{state} ({key})" for state in states), None)


def match_taints(
    taints: Iterable[str], user_tolerations: Iterable[Toleration] = (), *, tolerate_gpu_taints: bool = True
) -> tuple[tuple[Toleration, ...], tuple[str, ...]]:
    """Return (tolerations that pods need for these taints, taints that remain untolerated).

    ``user_tolerations``: tolerations of the pods; ``tolerate_gpu_taints``: add those of the table.
    """
    tolerations: list[Toleration] = []
    untolerated: list[str] = []
    for taint in taints:
        key, value, effect = parts(taint)
        if effect not in BLOCKING or any(item.covers(key, value, effect) for item in user_tolerations):
            continue
        toleration = tolerated(taint) if tolerate_gpu_taints else None
        if toleration is None:
            untolerated.append(taint)
        else:
            tolerations.append(toleration)
    return tuple(dict.fromkeys(tolerations)), tuple(untolerated)


def toleration_option(taints: Iterable[str]) -> str:
    """Return the flow option, quoted for a shell, with which its pods tolerate these taints."""
    tolerations = []
    for taint in taints:
        key, value, effect = parts(taint)
        tolerations.append(Toleration(key=key, effect=effect, value=value or None).to_dict())
    listed = json.dumps(tolerations, separators=(",", ":"))
    return f"--with {shlex.quote(f'kubernetes:tolerations={listed}')}"


def taint_text(taint: Mapping[str, Any]) -> str:
    """Format a taint of the API as key=value:effect."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def is_gpu_toleration(toleration: Toleration) -> bool:
    """Return whether the table of GPU taints includes this toleration."""
    return tolerated(f"{toleration.key}={toleration.value or ''}:{toleration.effect}") is not None


def parts(taint: str) -> tuple[str, str, str]:
    """Split key=value:effect into (key, value, effect); the value is optional."""
    pair, _, effect = taint.rpartition(":")
    key, _, value = pair.partition("=")
    return key, value, effect
