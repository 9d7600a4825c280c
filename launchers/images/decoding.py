"""One encoded image: is it whole, and what has to be changed so that its pixels are RGB and upright?"""

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

_KEPT = ("PNG", "JPEG", "WEBP")
_PHOTO = "MPO"  # what Pillow calls a JPEG file with more images behind it, as some cameras write
_CONVERTED = ("BMP", "GIF", "TIFF")
_ORIENTATION = 0x0112  # of EXIF; 1 is upright
_MODES = {"CMYK": "from CMYK", "P": "from a palette", "L": "from grey", "1": "from black and white"}
# What Pillow's decoders raise for broken files
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError),
    *(struct.error, zlib.error),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A PNG, JPEG or WebP file whose pixels are RGB and upright."""

    image: bytes
    width: int
    height: int
    changes: tuple[str, ...] = ()  # in words; of an image without any, the file is the one that was given


def checked(data: bytes, *, min_side: int) -> Checked:
    """The image of a file's bytes, encoded anew (as PNG) only where it had to be changed.

    Palettes, grey and CMYK become RGB, what is transparent is put on white, EXIF's orientation is applied.
    Raises BadRow for what is no image, is broken, animated, too large to be decoded, or has a side of fewer
    than ``min_side`` pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", _pillow().DecompressionBombWarning)
            return _checked(data, min_side)
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


def _checked(data: bytes, min_side: int) -> Checked:
    with _pillow().open(io.BytesIO(data), formats=(*_KEPT, *_CONVERTED)) as image:
        width, height = image.size
        if min(width, height) < min_side:
            raise BadRow(f"{width} x {height} pixels, but the shorter side has to have {min_side} at least")
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
    changes.append("turned as EXIF says")
    return ImageOps.exif_transpose(image)


def _rgb(image: Image.Image, changes: list[str]) -> Image.Image:
    if image.mode == "F":
        raise BadRow("floating-point pixels, whose white nobody knows")
    if image.has_transparency_data:
        changes.append("transparency put on white")
        alpha = image.convert("RGBA")
        white: Image.Image = _pillow().new("RGBA", alpha.size, "white")
        white.alpha_composite(alpha)
        return white.convert("RGB")
    if image.mode.startswith("I"):  # 16 bits, which Pillow's conversion would cut off at 255
        changes.append("from 16 bits")
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode != "RGB":
        changes.append(_MODES.get(image.mode, f"from {image.mode}"))
        return image.convert("RGB")
    return image


def _png(image: Image.Image) -> bytes:
    image.info = {}  # a colour profile, say, which is one of the pixels before
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
