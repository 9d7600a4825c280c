"""One line of the answer, and what never stands in it: the values of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

State = Literal["ok", "unknown", "no"]

HIDDEN = "***"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]+@")  # in an address: user and password
_SHORTEST = 4  # characters of a value that is looked for: shorter ones stand in any text


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What was looked at, how it stands, and what mends it (a command, where there is one).

    ``needs``: names of other lines that have to be "ok" for this one to count.
    """

    check: str
    state: State
    found: str
    fix: str = ""
    needs: tuple[str, ...] = ()


def without_secrets(line: Line, environment: Mapping[str, str] = os.environ) -> Line:
    """The line on one row each of ``found`` and ``fix``, with no secret of the environment in either."""
    secrets = [
        value for name, value in environment.items() if len(value) >= _SHORTEST and _SECRET_NAME.search(name)
    ]
    secrets.sort(key=len, reverse=True)  # one may be the beginning of another

    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return " ".join(_LOGIN.sub(f"://{HIDDEN}@", text).split())

    return replace(line, found=clean(line.found), fix=clean(line.fix))
