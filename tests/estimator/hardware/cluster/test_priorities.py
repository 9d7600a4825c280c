"""The PriorityClasses of a cluster."""

from __future__ import annotations

from typing import Any

from estimator.hardware.cluster.priorities import default_priority_class, read_priority_classes


def _get(path: str) -> dict[str, Any]:
    assert path == "/apis/scheduling.k8s.io/v1/priorityclasses"
    rows = [("high", 9, False), ("usual", 5, True), ("lowest", -1, False), ("lower", 4, True)]
    return {
        "items": [
            {"metadata": {"name": name}, "value": value, **({"globalDefault": True} if default else {})}
            for name, value, default in rows
        ]
    }


def test_priority_classes_are_sorted_lowest_first() -> None:
    assert [item.name for item in read_priority_classes(_get)] == ["lowest", "lower", "usual", "high"]


def test_the_lowest_of_several_default_classes_is_used_and_none_without_a_default() -> None:
    assert (default_priority_class(_get), default_priority_class(lambda _: {"items": []})) == ("lower", "")
