"""Reward of the GRPO run."""

from __future__ import annotations


def length(_prompt: str, answer: str) -> float:
    """Return the number of words of an answer, which differs within a group."""
    return float(len(answer.split()))
