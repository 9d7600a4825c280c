"""The card of a running and of a finished step, drawn by a real browser without a network."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from tests.decorators.conftest import Home, wait_until

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURED_GREEN, UPPER_BOUND_RED = (0x54, 0xA2, 0x4B), (0xE4, 0x57, 0x56)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a chromium or chrome to draw the card")


def browse(page: Path, *options: str) -> str:
    """Open a page 1100 pixels wide and 900 high in a browser of its own; returns what it prints."""
    profile = page.parent / f"profile-{page.stem}-{abs(hash(options))}"
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # a card must not need a network
        "--virtual-time-budget=8000",
        f"--user-data-dir={profile}",
        "--window-size=1100,900",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def first_screen(page: Path) -> list[bytes]:
    """The picture of the page before any scrolling: its rows, each of RGB triples."""
    picture = page.with_suffix(".png")
    browse(page, f"--screenshot={picture}")
    return read_png(picture)


def read_png(picture: Path) -> list[bytes]:
    """Rows of RGB triples of an 8-bit RGB or RGBA PNG (RFC 2083, section 6: filters)."""
    data = picture.read_bytes()
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert depth == 8
    size = {2: 3, 6: 4}[colour]
    packed = b"".join(
        data[m.end() : m.end() + struct.unpack(">I", data[m.start() - 4 : m.start()])[0]]
        for m in re.finditer(rb"IDAT", data)
    )
    flat = zlib.decompress(packed)
    rows: list[bytes] = []
    before = bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        kind, line = flat[start], bytearray(flat[start + 1 : start + 1 + width * size])
        for x in range(len(line)):
            left = line[x - size] if x >= size else 0
            up, corner = before[x], before[x - size] if x >= size else 0
            near = min((left, up, corner), key=lambda v, t=left + up - corner: abs(t - v))
            line[x] = (line[x] + (0, left, up, (left + up) // 2, near)[kind]) & 255
        before = line
        rows.append(b"".join(bytes(line[i : i + 3]) for i in range(0, len(line), size)))
    return rows


def widest(rows: list[bytes], colour: tuple[int, int, int]) -> int:
    """The most pixels of one colour in one row."""
    wanted = bytes(colour)
    return max(sum(row[i : i + 3] == wanted for i in range(0, len(row), 3)) for row in rows)


def words(page: Path) -> str:
    """The page's text after its scripts have run."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", browse(page, "--dump-dom").split("<body", 1)[1]))


def charts(page: Path) -> int:
    return len(re.findall(r"<canvas|<svg[^>]*class=\"marks\"", browse(page, "--dump-dom")))


def _get(home: Home, name: str) -> Path | None:
    page = home.path / name
    home.run("profiled.py", "card", "get", "train", name)
    return page if page.exists() and page.stat().st_size else None


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The card's page while the step runs, and after it has ended."""
    home = Home(tmp_path_factory.mktemp("cards"))
    (home.path / ".metaflow").mkdir()
    options = ("--model", "llama-8b", "--steps", "120", "--of-steps", "400", "--seconds", "25")
    flow = home.start("profiled.py", "run", *options)
    try:
        running = wait_until(lambda: _get(home, "running.html"), 60)
        assert flow.wait(120) == 0, (home.path / "output.txt").read_text()
    finally:
        flow.kill()
        flow.wait()
    finished = _get(home, "finished.html")
    assert finished is not None
    return running, finished


def test_the_card_of_a_running_step_shows_its_progress_and_predicted_beside_measured(
    pages: tuple[Path, Path],
) -> None:
    text = words(pages[0])
    assert "llama-8b · full · torchtune · 1 node x 8 A100-80GB" in text
    assert "Running for" in text
    assert "step 120 of 400 · loss 1.2" in text
    assert "ETA 9:" in text
    assert re.search(r"memory of a GPU 33.0 GiB, at most 40.0 GiB 31.9 GiB", text)
    assert re.search(r"tokens/s 24,000 16,391", text)
    assert charts(pages[0]) == 3


def test_the_card_of_a_finished_step_says_so(pages: tuple[Path, Path]) -> None:
    text = words(pages[1])
    assert "Finished in" in text
    assert "Running" not in text
    assert "The cheapest machine that fits." in text
    assert "cuda:7 NVIDIA A100-SXM4-80GB" in text
    assert charts(pages[1]) == 3


@pytest.mark.parametrize("which", [0, 1], ids=["running", "finished"])
def test_the_memory_bars_are_seen_without_scrolling(pages: tuple[Path, Path], which: int) -> None:
    rows = first_screen(pages[which])
    assert len(rows) == 900
    # 29.9 GiB allocated of an axis of 80 GiB: more than a quarter of the column of some 700 pixels.
    assert widest(rows, MEASURED_GREEN) > 180
    assert sum(widest([row], UPPER_BOUND_RED) > 0 for row in rows) > 50


def test_the_card_of_a_failed_step_says_why(home: Home) -> None:
    done = home.run("profiled.py", "run", "--steps", "5", "--of-steps", "40", "--fail", "train")
    assert done.returncode == 1
    page = _get(home, "failed.html")
    assert page is not None
    text = words(page)
    assert "Failed after" in text
    assert "step 5 of 40" in text
    assert "ValueError: the loss is not a number" in text
