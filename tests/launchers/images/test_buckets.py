import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.images.buckets import bucket_of, buckets, fit

sides = st.integers(min_value=1, max_value=5000)
resolutions = st.sampled_from([64, 256, 512, 768, 1024])

# Podell et al. 2023 (arXiv:2307.01952), appendix I: those of the widest area in each row from 1:2 to 2:1
SDXL = {
    *((704, 1408), (768, 1344), (832, 1216), (896, 1152), (960, 1088), (1024, 1024)),
    *((1088, 960), (1152, 896), (1216, 832), (1344, 768), (1408, 704)),
}


def test_buckets_at_1024_equal_those_that_stable_diffusion_xl_was_trained_with() -> None:
    assert set(buckets(1024)) == SDXL


@pytest.mark.parametrize("resolution", [64, 72, 256, 504, 512, 640, 768, 1000, 1024, 1536])
def test_buckets_respect_step_area_and_ratio_limits_and_include_their_transposes(resolution: int) -> None:
    sizes = buckets(resolution)
    step = 8 if resolution < 512 else 64
    for width, height in sizes:
        assert width % step == height % step == 0
        assert width * height <= resolution**2
        assert 0.5 <= width / height <= 2
        assert (height, width) in sizes
        assert width * height > 0.6 * resolution**2
    assert len({width / height for width, height in sizes}) == len(sizes)
    assert any(width == height for width, height in sizes)


@given(width=sides, height=sides, resolution=resolutions)
def test_an_image_is_assigned_to_the_bucket_with_the_nearest_ratio(
    width: int, height: int, resolution: int
) -> None:
    bucket = bucket_of(width, height, resolution)

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1]) - math.log(width / height))

    assert distance(bucket) == min(map(distance, buckets(resolution)))
    assert bucket_of(height, width, resolution) == bucket[::-1] or distance(bucket) == pytest.approx(
        distance(bucket_of(height, width, resolution)[::-1])
    )


@given(width=sides, height=sides, resolution=resolutions)
def test_an_image_is_resized_to_cover_its_bucket_and_center_cropped(
    width: int, height: int, resolution: int
) -> None:
    resized = fit(width, height, resolution)
    assert (resized.width, resized.height) == bucket_of(width, height, resolution)
    over = resized.resized_width - resized.width, resized.resized_height - resized.height
    assert min(over) == 0
    assert (resized.left, resized.top) == (over[0] // 2, over[1] // 2)
    if over[1] == 0:
        assert abs(resized.resized_width - width * resized.height / height) <= 0.5 or over[0] == 0
    else:
        assert abs(resized.resized_height - height * resized.width / width) <= 0.5
