"""One line of the result, and masking of secrets in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from estimator.masking import mask_secrets

State = Literal["ok", "unknown", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Result of one check: subject, state, and remedy (a command, if there is one).

    ``needs``: names of other lines that have to be "ok" for this one to count.
    """

    check: str
    state: State
    found: str
    fix: str = ""
    needs: tuple[str, ...] = ()


def without_secrets(line: Line, environment: Mapping[str, str] = os.environ) -> Line:
    """Return the line with ``found`` and ``fix`` on one row each and secrets of the environment masked."""

    def clean(text: str) -> str:
        return " ".join(mask_secrets(text, environment).split())

    return replace(line, found=clean(line.found), fix=clean(line.fix))
