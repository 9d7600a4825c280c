import io
import json
from collections import Counter
from pathlib import Path

import pytest

from launchers.dataset import drawn_shapes

Image = pytest.importorskip("PIL.Image")
ImageChops = pytest.importorskip("PIL.ImageChops")


def test_the_folder_is_readable_by_imagefolder_and_identical_every_time(tmp_path: Path) -> None:
    folders = [drawn_shapes.write(tmp_path / name, 64) for name in ("a", "b")]
    rows = [json.loads(line) for line in (folders[0] / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    assert {path.name for path in folders[0].iterdir()} == {
        "metadata.jsonl",
        *(row["file_name"] for row in rows),
    }
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_larger_set_of_images_begins_with_the_smaller_set_and_replaces_it(tmp_path: Path) -> None:
    folder = drawn_shapes.write(tmp_path / "shapes", 4)
    before = (folder / "metadata.jsonl").read_text()
    stamp = (folder / "00000.png").stat().st_mtime_ns
    drawn_shapes.write(folder, 4)
    assert (folder / "00000.png").stat().st_mtime_ns == stamp  # left alone
    drawn_shapes.write(folder, 6)
    assert (folder / "metadata.jsonl").read_text().startswith(before)
    assert (folder / "00005.png").is_file()


def test_captions_describe_the_drawn_shapes() -> None:
    for caption, file in drawn_shapes.draw_images(60):
        _, size, color, shape, *place, _, _, background, _ = caption.split()
        image = Image.open(io.BytesIO(file))
        empty = Image.new("RGB", image.size, drawn_shapes.BACKGROUNDS[background])
        assert {value for _, value in image.getcolors()} == {
            drawn_shapes.COLORS[color],
            drawn_shapes.BACKGROUNDS[background],
        }
        remaining, top, right, bottom = ImageChops.difference(image, empty).getbbox()
        assert right - remaining == pytest.approx(2 * drawn_shapes.SIZES[size] * min(image.size), abs=3)
        center = (remaining + right) / 2 / image.width, (top + bottom) / 2 / image.height
        assert center == pytest.approx(drawn_shapes.POSITIONS[" ".join(place)], abs=0.03), caption
        middle = image.getpixel(((remaining + right) // 2, (top + bottom) // 2))
        assert (middle == drawn_shapes.COLORS[color]) == (shape != "ring")


def test_captions_of_the_default_set_are_unique_and_each_shape_has_each_image_size() -> None:
    image_sizes = [
        (caption, Image.open(io.BytesIO(file)).size)
        for caption, file in drawn_shapes.draw_images(drawn_shapes.COUNT)
    ]
    assert len({caption for caption, _ in image_sizes}) == drawn_shapes.COUNT
    formats = Counter((caption.split()[3], size) for caption, size in image_sizes)
    assert len(formats) == len(drawn_shapes.SHAPES) * len(set(drawn_shapes.FORMATS))
    assert min(formats.values()) > 10
