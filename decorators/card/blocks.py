"""Blocks of a card, and the formatting of text and sizes in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from estimator.plan import GIB

UNKNOWN = "unknown"
MAY_BREAK = "\N{ZERO WIDTH SPACE}"  # allows a line break inside a word, for narrow cells
_LOOK_ALIKES = str.maketrans(
    {
        "*": "\N{ASTERISK OPERATOR}",
        "`": "\N{MODIFIER LETTER PRIME}",
        "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
        ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
        "~": "\N{TILDE OPERATOR}",
        "\\": "\N{SET MINUS}",
    }
)
_LONG_WORD = re.compile(r"\S{16}(?=\S)")  # fits a column of a 400 pixels wide page
_LIKE_UNDERSCORE = "\N{MODIFIER LETTER LOW MACRON}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    markdown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Table whose cells are text or blocks."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Preformatted lines."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """PNG file in base64 with a caption."""

    png: str
    label: str


Block = Text | Chart | Grid | Log | Picture


def size(value: float | None) -> str:
    """Format bytes in GiB (or MiB below 1 GiB), or "unknown"."""
    if value is None:
        return UNKNOWN
    if value < GIB:
        return f"{value / 2**20:,.0f} MiB"
    return f"{value / GIB:,.1f} GiB" if value < 100 * GIB else f"{value / GIB:,.0f} GiB"


def breakable(text: str) -> str:
    """Insert break opportunities into long words, for narrow cells."""
    return _LONG_WORD.sub(lambda word: word[0] + MAY_BREAK, text)


def safe(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, in one line. Cells of tables need no escaping.

    Metaflow's cards drop characters after a backslash and do not decode HTML entities, so special characters
    are replaced by look-alikes.
    """
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", _LIKE_UNDERSCORE, text)  # within a word it means nothing
    return " ".join(text.translate(_LOOK_ALIKES).replace("](", f"]{MAY_BREAK}(").split())
