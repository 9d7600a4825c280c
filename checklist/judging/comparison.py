"""Comparison of a figure with its references: a floor or an expectation, its peers, its own history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checklist.analysis.baseline import Past
from checklist.analysis.expectation import Expectation
from checklist.judging.thresholds import Threshold
from checklist.result import Figure

Level = Literal["PASS", "WARN", "FAIL"]
Basis = Literal["floor", "expectation", "peers", "history", "none"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing a figure with its references."""

    level: Level | None = None
    """None if there was no reference."""
    expected: float | None = None
    basis: Basis = "none"
    source: str | None = None
    deficit: str = ""
    """Description of the deficit, which follows the figure in a sentence."""

    @property
    def code(self) -> str:
        """Code of the advice for the figure (advice.yaml of the subject)."""
        codes = {"floor": "below-floor", "expectation": "below-expected", "peers": "straggler"}
        return codes.get(self.basis, "below-history")

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        size_bytes: int | None = None,
        node: str | None = None,
        rank: int | None = None,
    ) -> Figure:
        return Figure(
            name=name,
            value=value,
            unit=unit,
            verdict=self.level or "NO-VERDICT",
            bytes=size_bytes,
            node=node,
            rank=rank,
            expected=self.expected,
            basis=self.basis,
            source=self.source,
        )


def compare(
    value: float,
    threshold: Threshold | None = None,
    against_peers: tuple[Level, float] | None = None,
    past: Past | None = None,
    expectation: Expectation | None = None,
) -> Comparison:
    """Return the first bad comparison among the references, else the first.

    A threshold replaces the expectation; peers are given as (verdict, median).
    """
    comparisons = [
        result
        for result in (
            _compare_with_floor(value, threshold),
            _compare_with_expectation(value, expectation if threshold is None else None),
            _compare_with_peers(value, against_peers),
            compare_with_history(past),
        )
        if result.level is not None
    ]
    at_fault = (result for result in comparisons if result.level != "PASS")
    return next(at_fault, comparisons[0] if comparisons else Comparison())


def _compare_with_floor(value: float, threshold: Threshold | None) -> Comparison:
    if threshold is None:
        return Comparison()
    level: Level = "PASS"
    deficit = ""
    if value < threshold.floor:
        level, deficit = "FAIL", f"below the floor {threshold.floor:g} ({threshold.kind})"
    elif threshold.warn is not None and value < threshold.warn:
        level, deficit = "WARN", f"below the usual {threshold.warn:g}"
    return Comparison(level, threshold.floor, "floor", threshold.origin, deficit)


def _compare_with_expectation(value: float, expectation: Expectation | None) -> Comparison:
    if expectation is None:
        return Comparison()
    level = expectation.verdict(value)
    deficit = (
        f"of {expectation.typical:.3g} expected (at least {expectation.low:.3g}): {expectation.arithmetic}"
    )
    return Comparison(level, expectation.typical, "expectation", expectation.arithmetic, deficit)


def _compare_with_peers(value: float, against_peers: tuple[Level, float] | None) -> Comparison:
    if against_peers is None:
        return Comparison()
    level, median = against_peers
    return Comparison(
        level, median, "peers", None, f"{1 - value / median:.0%} below its peers" if median else ""
    )


def compare_with_history(past: Past | None) -> Comparison:
    """Compare a figure with its own history alone."""
    if past is None:
        return Comparison()
    deficit = f"{-past.change:.0%} worse than in earlier runs, {past.median:.4g}"
    return Comparison(past.verdict, past.median, "history", None, deficit)
