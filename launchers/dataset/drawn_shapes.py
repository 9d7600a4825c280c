"""Built-in image dataset: drawn shapes with captions that describe them.

The dataset is a folder with metadata.jsonl, the imagefolder format of ``datasets``. Images are deterministic:
image n is the same in datasets of any size.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.base.workdir import make_folder

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

BUILT_IN = "drawn-shapes"
COUNT = 512  # default number of images

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (245, 205, 40),
    "purple": (130, 60, 170),
    "orange": (250, 130, 20),
}
BACKGROUNDS = {"white": (255, 255, 255), "black": (10, 10, 10), "grey": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
SIZES = {"small": 0.15, "large": 0.28}  # half the shape's width over the image's shorter side
POSITIONS = {"in the middle": (0.5, 0.5), "on the left": (0.3, 0.5), "on the right": (0.7, 0.5)}
FORMATS = ((64, 64), (80, 60), (64, 64), (60, 80), (64, 64), (96, 64))  # width and height in pixels
_STRIDE = 191  # step through the 540 combinations from image to image; coprime to 540
_LINE = 0.3  # line width of a cross or ring, as a share of half its width


def write(folder: Path, count: int = COUNT) -> Path:
    """Write ``count`` images into ``folder`` atomically and return it; a complete folder is not changed."""

    def write_images(path: Path) -> None:
        with (path / "metadata.jsonl").open("w", encoding="utf-8") as file:
            for number, (caption, image) in enumerate(draw_images(count)):
                name = f"{number:05d}.png"
                (path / name).write_bytes(image)
                file.write(json.dumps({"file_name": name, "text": caption}) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # it has another number of images

    return make_folder(folder, write_images, lambda path: _has_images(path, count))


def draw_images(count: int) -> Iterator[tuple[str, bytes]]:
    """Iterate over (caption, content of a PNG file) of ``count`` images."""
    for number in range(count):
        caption, image = _draw_image(number)
        file = io.BytesIO()
        image.save(file, "PNG")
        yield caption, file.getvalue()


def _has_images(folder: Path, count: int) -> bool:
    try:
        with (folder / "metadata.jsonl").open(encoding="utf-8") as file:
            return sum(1 for _ in file) == count
    except OSError:
        return False


def _draw_image(number: int) -> tuple[str, Image.Image]:
    """Draw image ``number``; return its caption and the image."""
    from PIL import Image, ImageDraw

    kinds = list(itertools.product(COLORS, SHAPES, BACKGROUNDS, SIZES, POSITIONS))
    color, shape, background, size, position = kinds[number * _STRIDE % len(kinds)]
    shift = number // len(FORMATS) + number // len(kinds)  # so that each combination occurs in every format
    width, height = FORMATS[(number + shift) % len(FORMATS)]
    image = Image.new("RGB", (width, height), BACKGROUNDS[background])
    half = SIZES[size] * min(width, height)
    center_x, center_y = POSITIONS[position]
    _draw_shape(ImageDraw.Draw(image), shape, COLORS[color], (center_x * width, center_y * height), half)
    return f"a {size} {color} {shape} {position} of a {background} background", image


def _draw_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    color: tuple[int, int, int],
    center: tuple[float, float],
    half: float,
) -> None:
    """Draw one shape. ``half``: half of its width in pixels."""
    x, y = center
    box, line = (x - half, y - half, x + half, y + half), _LINE * half
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "ring":
        draw.ellipse(box, outline=color, width=round(line))
    elif shape == "square":
        draw.rectangle(box, fill=color)
    elif shape == "triangle":
        draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=color)
    else:
        draw.rectangle((x - half, y - line, x + half, y + line), fill=color)
        draw.rectangle((x - line, y - half, x + line, y + half), fill=color)
