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


def test_classes_are_read_the_lowest_first() -> None:
    assert [item.name for item in read_priority_classes(_get)] == ["lowest", "lower", "usual", "high"]


def test_of_several_defaults_the_lowest_counts_and_without_one_there_is_none() -> None:
    assert (default_priority_class(_get), default_priority_class(lambda _: {"items": []})) == ("lower", "")
