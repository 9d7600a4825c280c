"""Files of a made-up host."""

from __future__ import annotations

from pathlib import Path


def host(folder: Path, **files: str) -> Path:
    """A root with those files, whose names have / as __."""
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder
