"""Values from small files of the kernel (/proc, /sys), which may be missing or not permitted."""

from __future__ import annotations

from pathlib import Path


def read_text(file: Path) -> str | None:
    """Return the file's text; None if it is missing, unreadable or blank."""
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def read_number(file: Path) -> int | None:
    """Return the file's whole number; None if it contains none."""
    try:
        return int(read_text(file) or "")
    except ValueError:
        return None


def read_bytes(file: Path) -> bytes:
    """Return the file's content; empty if it is missing or unreadable."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
