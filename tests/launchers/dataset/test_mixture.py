"""Mixtures of datasets: how often an epoch has the rows of each."""

from __future__ import annotations

from collections import Counter

from launchers.dataset import mixture
from launchers.dataset.preferences import Sample
from launchers.dataset.rows import Conversation
from launchers.settings import build


def rows(name: str, count: int, source: int) -> list[Sample]:
    return [Conversation(text=f"{name}{n}", source=source) for n in range(count)]


def test_integer_weights_repeat_rows_and_fractions_sample_rows() -> None:
    settings = build({"dataset": "a.jsonl", "mixture": {"b.jsonl": 2, "c.jsonl": 0.5, "d.jsonl": 1.25}})
    train = [*rows("a", 5, 0), *rows("b", 3, 1), *rows("c", 10, 2), *rows("d", 8, 3)]
    chosen = mixture.weighted(train, settings)
    times = Counter(row.text for row in chosen if isinstance(row, Conversation))
    assert all(times[f"a{n}"] == 1 for n in range(5))
    assert all(times[f"b{n}"] == 2 for n in range(3))
    assert sorted(times[f"c{n}"] for n in range(10)) == [0] * 5 + [1] * 5
    assert sorted(times[f"d{n}"] for n in range(8)) == [1] * 6 + [2] * 2
    assert mixture.summary(chosen, settings).splitlines() == [
        "a.jsonl: weight 1, 5 rows an epoch",
        "b.jsonl: weight 2, 6 rows an epoch",
        "c.jsonl: weight 0.5, 5 rows an epoch",
        "d.jsonl: weight 1.25, 10 rows an epoch",
    ]


def test_sampled_rows_depend_on_the_seed_alone() -> None:
    train = [*rows("a", 2, 0), *rows("b", 40, 1)]

    def drawn(seed: int) -> list[Sample]:
        return list(mixture.weighted(train, build({"seed": seed, "mixture": {"b.jsonl": 0.3}})))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
