import contextlib
import io
from typing import Any

import pytest

from launchers.dataset.files import BadRow
from launchers.images.decoding import checked
from tests.launchers.images.encoded import encoded

Image = pytest.importorskip("PIL.Image")


def pixel(data: bytes, place: tuple[int, int] = (0, 0)) -> Any:
    image = Image.open(io.BytesIO(data))
    assert image.mode == "RGB"
    return image.getpixel(place)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_valid_image_file_is_kept_unchanged(kind: str) -> None:
    data = encoded(kind=kind)
    decoded = checked(data, min_side=12)
    assert decoded.image is data
    assert (decoded.width, decoded.height, decoded.changes) == (16, 12, ())


@pytest.mark.parametrize(
    ("mode", "kind", "change", "color"),
    [
        ("CMYK", "JPEG", "from CMYK", (254, 0, 0)),
        ("RGBA", "PNG", "transparency replaced by white", (255, 255, 255)),
        ("L", "JPEG", "from grey", (1, 1, 1)),
        ("P", "PNG", "from a palette", (1, 1, 1)),
        ("RGB", "BMP", "from BMP", (200, 30, 40)),
    ],
)
def test_images_of_other_color_modes_are_converted_to_rgb(
    mode: str, kind: str, change: str, color: tuple[int, int, int]
) -> None:
    palette = {"palette": bytes(value // 3 for value in range(768))} if mode == "P" else {}
    decoded = checked(encoded(mode, kind=kind, **palette), min_side=1)
    assert decoded.changes == (change,)
    assert pixel(decoded.image) == pytest.approx(color, abs=2)


def test_transparent_palette_colors_become_white_and_16_bit_images_keep_their_brightness() -> None:
    palette, deep = Image.new("P", (8, 8), 1), Image.new("I;16", (8, 8), 128 * 256)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    for image, options, change, color in (
        (palette, {"transparency": 1}, "transparency replaced by white", (255, 255, 255)),
        (deep, {}, "from 16 bits", (128, 128, 128)),
    ):
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        decoded = checked(file.getvalue(), min_side=1)
        assert decoded.changes == (change,)
        assert pixel(decoded.image) == color


def test_the_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (16, 8), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 8, 8))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right: left becomes top
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    decoded = checked(file.getvalue(), min_side=1)
    assert (decoded.width, decoded.height, decoded.changes) == (8, 16, ("rotated by EXIF",))
    assert (pixel(decoded.image, (4, 2)), pixel(decoded.image, (4, 14))) == ((255, 255, 255), (0, 0, 0))
    assert checked(decoded.image, min_side=1).changes == ()


def animated(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (encoded(kind="JPEG", size=(64, 64))[:-20], "(?i)broken image .*truncated"),
        (encoded(kind="WEBP", size=(64, 64))[:-20], "not an image|broken image"),
        (encoded(size=(1, 1)), "1 x 1 pixels, but the shorter side must have at least 8"),
        (animated("GIF"), "3 images in one file"),
    ],
)
def test_an_unusable_image_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        checked(data, min_side=8)


@pytest.mark.parametrize("limit", [900, 300])  # Pillow warns above its limit, and refuses above twice that
def test_an_image_above_pillows_limit_is_not_decoded(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(size=(32, 32))
    assert checked(data, min_side=8).width == 32
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(BadRow, match=f"more than {limit} pixels"):
        checked(data, min_side=8)


def test_any_corruption_of_a_file_is_reported_as_a_reason() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        data = encoded(size=(24, 24), kind=kind)
        for place in range(0, len(data), 7):
            changed = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
            with contextlib.suppress(BadRow):
                assert checked(changed, min_side=8).width >= 8
