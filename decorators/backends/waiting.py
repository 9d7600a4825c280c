"""What a look at a waiting job tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopeless:
    """Something that waiting alone doesn't cure."""

    kind: str
    grace_s: float
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Whether the job still waits, and for what; ``reason`` is empty where nobody tells."""

    pending: bool
    reason: str = ""
    hopeless: Hopeless | None = None


STARTED = State(pending=False)
