import io
from typing import Any

import pytest


def encoded(mode: str = "RGB", size: tuple[int, int] = (16, 12), kind: str = "PNG", **options: Any) -> bytes:
    """Return an image file of one color."""
    image = pytest.importorskip("PIL.Image")
    colors = {"RGB": (200, 30, 40), "RGBA": (200, 30, 40, 0), "CMYK": (0, 255, 255, 0), "LA": (90, 0)}
    drawn = image.new(mode, size, colors.get(mode, 1))
    file = io.BytesIO()
    drawn.save(file, kind, **options)
    return file.getvalue()
