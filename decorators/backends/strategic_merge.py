"""Kubernetes' strategic merge patch, for pod templates.

Maps are merged key by key, and null removes a key. Lists whose items have a merge key
(``data/merge_keys.csv``) are merged item by item; other lists are replaced. ``$patch: delete`` removes an
item; ``$patch: replace`` replaces a whole map or, as a separate item, the whole list.
"""

from __future__ import annotations

import copy
from typing import Any

from decorators.backends import tables

DIRECTIVE = "$patch"


def merge(original: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the pod template with the patch applied; neither input is changed."""
    if patch.get(DIRECTIVE) == "replace":
        return {name: copy.deepcopy(value) for name, value in patch.items() if name != DIRECTIVE}
    merged = copy.deepcopy(original)
    for name, value in patch.items():
        if value is None or (isinstance(value, dict) and value.get(DIRECTIVE) == "delete"):
            merged.pop(name, None)
        elif isinstance(value, dict):
            current = merged.get(name)
            merged[name] = merge(current if isinstance(current, dict) else {}, value)
        elif isinstance(value, list) and (key := tables.merge_keys().get(name)):
            merged[name] = _items(merged.get(name) or [], value, key)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _items(original: list[Any], patch: list[Any], key: str) -> list[Any]:
    if {DIRECTIVE: "replace"} in patch:
        original, patch = [], [item for item in patch if item != {DIRECTIVE: "replace"}]
    merged = {item[key]: item for item in original}
    for item in patch:
        if item.get(DIRECTIVE) == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = merge(merged.get(item[key], {}), item)
    return list(merged.values())
