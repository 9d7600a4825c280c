"""Decoding of an image file: validation, and conversion to upright RGB pixels."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from estimator.errors import UserError
from launchers.dataset.files import BadRow

if TYPE_CHECKING:
    from PIL import Image

_ACCEPTED = ("PNG", "JPEG", "WEBP")
_PHOTO = "MPO"  # Pillow's name of a JPEG file with additional images, written by some cameras
_CONVERTED = ("BMP", "GIF", "TIFF")
_ORIENTATION = 0x0112  # EXIF tag; 1 is upright
_MODES = {"CMYK": "from CMYK", "P": "from a palette", "L": "from grey", "1": "from black and white"}
# Exceptions of Pillow's decoders for broken files
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError),
    *(struct.error, zlib.error),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A valid PNG, JPEG or WebP file with upright RGB pixels."""

    image: bytes
    width: int
    height: int
    changes: tuple[str, ...] = ()  # descriptions; if empty, the file is the original


def checked(data: bytes, *, min_side: int) -> Checked:
    """Validate an image file, and convert it (to PNG) only if necessary.

    Palettes, grayscale and CMYK become RGB, transparency is replaced by white, EXIF's orientation is applied.
    Raises BadRow for files that are not an image, broken, animated, too large to decode, or have a side of
    fewer than ``min_side`` pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", _pillow().DecompressionBombWarning)
            return _check_and_convert(data, min_side)
    except (_pillow().DecompressionBombError, _pillow().DecompressionBombWarning):
        limit = _pillow().MAX_IMAGE_PIXELS
        raise BadRow(f"more than {limit:,} pixels, Pillow's limit against decompression bombs") from None
    except _pillow().UnidentifiedImageError:
        raise BadRow("not an image that can be read (PNG, JPEG, WebP, BMP, GIF, TIFF)") from None
    except _BROKEN as error:
        raise BadRow(f"a broken image ({str(error).partition(chr(10))[0] or type(error).__name__})") from None


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "Images need the `pillow` package, which is not installed.",
            "With Python 3.11 or newer: pip install 'metaflow-finetune[diffusion]'",
        ) from None
    return Image


def _check_and_convert(data: bytes, min_side: int) -> Checked:
    with _pillow().open(io.BytesIO(data), formats=(*_ACCEPTED, *_CONVERTED)) as image:
        width, height = image.size
        if min(width, height) < min_side:
            raise BadRow(f"{width} x {height} pixels, but the shorter side must have at least {min_side}")
        if image.format != _PHOTO and getattr(image, "is_animated", False):
            raise BadRow(f"{image.n_frames} images in one file")
        image.load()
        changes = [f"from {image.format}"] if image.format in _CONVERTED else []
        upright = _upright(image, changes)
        rgb = _rgb(upright, changes)
    if not changes:
        return Checked(image=data, width=width, height=height)
    return Checked(image=_png(rgb), width=rgb.width, height=rgb.height, changes=tuple(changes))


def _upright(image: Image.Image, changes: list[str]) -> Image.Image:
    from PIL import ImageOps

    if image.getexif().get(_ORIENTATION, 1) not in range(2, 9):
        return image
    changes.append("rotated by EXIF")
    return ImageOps.exif_transpose(image)


def _rgb(image: Image.Image, changes: list[str]) -> Image.Image:
    if image.mode == "F":
        raise BadRow("floating-point pixels, whose range is unknown")
    if image.has_transparency_data:
        changes.append("transparency replaced by white")
        alpha = image.convert("RGBA")
        white: Image.Image = _pillow().new("RGBA", alpha.size, "white")
        white.alpha_composite(alpha)
        return white.convert("RGB")
    if image.mode.startswith("I"):  # 16-bit values, which Pillow's conversion would clip at 255
        changes.append("from 16 bits")
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode != "RGB":
        changes.append(_MODES.get(image.mode, f"from {image.mode}"))
        return image.convert("RGB")
    return image


def _png(image: Image.Image) -> bytes:
    image.info = {}  # e.g. a color profile of the original pixels
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
