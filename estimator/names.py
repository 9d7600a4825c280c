"""What somebody may have meant by a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``Did you mean mesh?`` and a space, for the advice of an error; empty where nothing is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {near[0]}? " if near else ""
