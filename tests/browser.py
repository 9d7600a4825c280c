"""A headless browser without a network, for pages shown to users."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Started so, it shows nothing and asks nobody for anything by itself
HEADLESS = (
    str(BROWSER),
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a chromium or chrome to draw the card")


def browse(page: Path, *options: str) -> str:
    """Open a page in a new browser, 1100 by 900 pixels; return its console output."""
    profile = page.parent / f"profile-{page.stem}-{abs(hash(options))}"
    command = [
        *HEADLESS,
        "--host-resolver-rules=MAP * ~NOTFOUND",  # a card must not need a network
        "--virtual-time-budget=8000",
        f"--user-data-dir={profile}",
        "--window-size=1100,900",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def first_screen(page: Path) -> Image.Image:
    """Return a screenshot of the page before scrolling."""
    picture = page.with_suffix(".png")
    browse(page, f"--screenshot={picture}")
    with Image.open(picture) as image:
        return image.convert("RGB")


def widest(image: Image.Image, color: tuple[int, int, int]) -> int:
    """Return the longest run of one color in one row, in pixels."""
    return max(_counts(image, color))


def rows_with(image: Image.Image, color: tuple[int, int, int]) -> int:
    """Return the number of rows that contain a color."""
    return sum(count > 0 for count in _counts(image, color))


def _counts(image: Image.Image, color: tuple[int, int, int]) -> list[int]:
    data, width = image.tobytes(), image.width * 3
    pixel = bytes(color)
    rows = (data[start : start + width] for start in range(0, len(data), width))
    return [sum(row[i : i + 3] == pixel for i in range(0, width, 3)) for row in rows]


def words(page: Path) -> str:
    """Return the text of the page after its scripts have run."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", browse(page, "--dump-dom").split("<body", 1)[1]))


def charts(page: Path) -> int:
    return len(re.findall(r"<canvas|<svg[^>]*class=\"marks\"", browse(page, "--dump-dom")))
