import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.errors import UserError
from launchers.dataset import drawn_shapes
from launchers.dataset import prepare as texts
from launchers.dataset.picture import Picture
from launchers.dataset.prepared import Prepared
from launchers.images.prepare import prepare
from launchers.images.prepared import PreparedImages
from launchers.settings import Settings
from tests.launchers.dataset import chats

Image = pytest.importorskip("PIL.Image")


def pictures(count: int) -> list[Picture]:
    images = []
    for number, (caption, image) in enumerate(drawn_shapes.draw_images(count)):
        width, height = Image.open(io.BytesIO(image)).size
        images.append(Picture(caption=caption, image=image, width=width, height=height, line=number + 1))
    return images


def settings(**changes: Any) -> Settings:
    return Settings(**({"global_batch_size": 4, "epochs": 2} | changes))


def prepared(folder: Path, rows: Any, resolution: int = 64, **changes: Any) -> PreparedImages:
    held_out = changes.pop("held_out", ())
    prepare(
        rows,
        folder,
        settings=settings(**changes),
        model_name_or_fingerprint="tiny-sdxl",
        resolution=resolution,
        held_out=held_out,
    )
    return PreparedImages(folder)


def test_images_and_captions_are_read_back_unchanged_with_steps_and_lengths(tmp_path: Path) -> None:
    rows = pictures(60)
    rows[3] = Picture(caption="ein Käse\n“groß” 🧀", image=rows[3].image, width=64, height=64)
    data = prepared(tmp_path, rows)
    assert [data.image(index) for index in range(len(data))] == [row.image for row in rows]
    assert [data.caption(index) for index in range(len(data))] == [row.caption for row in rows]
    assert not list(tmp_path.glob("heldout"))
    plain = Prepared(tmp_path)  # any reader of prepared data
    assert (plain.info.task, len(plain)) == ("text-to-image", 60)
    assert len(plain.order) == plain.info.total_steps * 4
    areas = [data.target(index)[0] // 8 * (data.target(index)[1] // 8) for index in range(60)]
    assert (plain.row_lengths.tolist(), plain.info.tokens) == (areas, sum(areas))
    assert (plain.info.longest_row, plain.info.seq_len) == (64, 64)


def test_each_step_has_one_image_size_and_time_ids_record_resizing_and_cropping(tmp_path: Path) -> None:
    rows = pictures(60)
    data = prepared(tmp_path, rows)
    for step in data.order.reshape(-1, 4):
        assert len({data.target(int(index)) for index in step}) == 1
    wide = next(index for index, row in enumerate(rows) if (row.width, row.height) == (96, 64))
    assert data.time_ids(wide).tolist() == [64, 96, 2, 0, 48, 80]
    assert data.resized(wide) == (53, 80)


def test_pixels_equal_those_of_the_full_image_resized_and_cropped(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (200, 330, 3), dtype=np.uint8))
    file = io.BytesIO()
    noise.save(file, "PNG")
    picture = Picture(caption="noise", image=file.getvalue(), width=330, height=200)
    data = prepared(tmp_path, [picture], global_batch_size=1)
    height, width = data.target(0)
    full_image = noise.resize(data.resized(0)[::-1], Image.Resampling.LANCZOS)
    top, crop_left = data.time_ids(0)[2:4].tolist()
    cut = np.asarray(full_image.crop((crop_left, top, crop_left + width, top + height)), dtype=np.float32)
    pixel_values = data.pixels(0)
    assert pixel_values.shape == (3, height, width)
    assert pixel_values.dtype == np.float32
    assert np.abs(pixel_values - (cut.transpose(2, 0, 1) / 127.5 - 1)).max() <= 1.01 / 127.5
    assert -1 <= pixel_values.min() < -0.3 < 0.3 < pixel_values.max() <= 1


def test_a_very_narrow_image_takes_no_more_memory_than_its_bucket(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (20_000, 8), (255, 0, 0)).save(file, "PNG")
    strip = Picture(caption="a line", image=file.getvalue(), width=20_000, height=8)
    data = prepared(tmp_path, [strip], resolution=1024, global_batch_size=1)
    assert data.resized(0)[1] > 1_000_000
    assert data.pixels(0).shape == (3, 704, 1408)


def test_held_out_images_are_prepared_in_their_own_folder_with_one_row_per_step(tmp_path: Path) -> None:
    train, held_out = texts.split(chats.stored(pictures(40), tmp_path / "rows"), settings())
    data = prepared(tmp_path / "data", train, held_out=held_out)
    other = PreparedImages(tmp_path / "data" / "heldout")
    assert (len(data), len(other)) == (len(train), len(held_out))
    assert other.order.tolist() == list(range(len(held_out)))
    assert (other.info.global_batch_size, other.info.total_steps) == (1, len(held_out))
    assert other.info.total_steps > 0
    captions = {data.caption(index) for index in range(len(data))}
    assert not captions & {other.caption(index) for index in range(len(other))}
    prepared(tmp_path / "data", train)
    assert not (tmp_path / "data" / "heldout").exists()


def test_steps_are_limited_by_epochs_or_by_max_steps(tmp_path: Path) -> None:
    rows = pictures(45)
    once, thrice = (prepared(tmp_path, rows, epochs=epochs).info.total_steps for epochs in (1, 3))
    assert 1 < once < thrice
    assert prepared(tmp_path, rows, max_steps=5).info.total_steps == 5
    assert prepared(tmp_path, rows, epochs=None, max_steps=60).info.total_steps == 60, "repeated until then"
    assert prepared(tmp_path, rows[:3], epochs=None, global_batch_size=None).info.total_steps >= 1


def test_the_fingerprint_depends_on_all_settings_and_that_of_latents_only_on_the_rows(tmp_path: Path) -> None:
    rows = pictures(24)
    first = prepared(tmp_path, rows).info
    assert prepared(tmp_path, rows).info == first
    renamed = [*rows[:-1], Picture(caption="else", image=rows[-1].image, width=64, height=64)]
    other_rows = [
        prepared(tmp_path, renamed).info,
        prepared(tmp_path, rows[::-1]).info,
        prepared(tmp_path, rows, resolution=128).info,
    ]
    other_runs = [prepared(tmp_path, rows, seed=7).info, prepared(tmp_path, rows, global_batch_size=2).info]
    assert len({info.fingerprint for info in (first, *other_rows, *other_runs)}) == 6
    assert len({info.content for info in (first, *other_rows)}) == 4
    assert {info.content for info in other_runs} == {first.content}


def test_images_that_fill_no_batch_of_one_ratio_are_refused(tmp_path: Path) -> None:
    rows = pictures(12)
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, rows, global_batch_size=16, epochs=1)
    problem = str(caught.value)
    for expected_text in ("global_batch_size 16", "12 images", "the largest bucket has 6"):
        assert expected_text in problem
    assert not (tmp_path / "info.json").exists()
    assert prepared(tmp_path, rows, global_batch_size=6, epochs=1).info.total_steps == 1
