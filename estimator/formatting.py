"""Formatting of sizes, durations, amounts of money and lists; escaping of text before it is printed."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

GIB = 2**30
MIB = 2**20
_HARMLESS = "\n\t\u200c\u200d"  # the joiners of Persian, Hindi and emoji are formatting characters too
_ACTIVE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, formatting, halves of surrogates, separators


def printable(text: str) -> str:
    """Replace control and formatting characters by ``\\x1b``-like text, so that no terminal acts on them.

    Covers C0, DEL, C1, Unicode's invisible formatting characters (bidirectional overrides), and surrogates.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        character
        if character in _HARMLESS or unicodedata.category(character) not in _ACTIVE
        else character.encode("unicode_escape").decode()
        for character in text
    )


def format_bytes(size: float | None) -> str:
    """Format a size in binary units: "64 MiB", "1.50 GiB", "44.5 GiB"; "unknown" for None."""
    if size is None:
        return "unknown"
    if size < 0.1 * GIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:,.1f} GiB"


def format_duration(seconds: float) -> str:
    """Format a duration in its natural unit: "4.2 s", "45 s", "90 min", "3.5 h", from 10 days "46.3 days"."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    hours = seconds / 3600
    if hours < 240:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{hours:,.1f} h"
    days = hours / 24
    return f"{days:,.1f} days" if days < 2 * 365 else f"{days / 365.25:,.1f} years"


def format_clock(seconds: float) -> str:
    """Format a duration to the second, rounded up: "1:02:03", "2:03", "0:07"."""
    minutes, left_seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left_seconds:02d}" if hours else f"{minutes}:{left_seconds:02d}"


def format_usd(amount: float | None) -> str:
    """Format an amount in US dollars, with cents or two significant digits; "unknown" for None."""
    if amount is None:
        return "unknown"
    return (
        f"${amount:,.2f}" if amount >= 0.01 or amount <= 0 else f"${float(f'{amount:.2g}'):.10f}".rstrip("0")
    )


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun in the right number: "1 node", "2,048 tokens", "8 processes"."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def format_list(names: Sequence[str]) -> str:
    """Join names into a phrase: "full, lora and qlora"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def format_parameters(count: float) -> str:
    """Format a number of parameters, such as "5.2 M parameters" or "8.03 B parameters"."""
    return f"{count / 1e9:.2f} B parameters" if count >= 1e8 else f"{count / 1e6:.1f} M parameters"
