"""Files of a simulated host."""

from __future__ import annotations

from pathlib import Path


def host(folder: Path, **files: str) -> Path:
    """Create a root folder with the files; / in names is written as __."""
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder
