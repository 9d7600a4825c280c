"""Aspect ratio buckets: the sizes that images are trained in, all with about the resolution's area.

The rule is NovelAI's ("NovelAI Improvements on Stable Diffusion", 2022, section "Aspect Ratio Bucketing"):
for each width the greatest height within the area, both multiples of a step, and the same with width and
height exchanged; an image belongs to the bucket with the nearest ratio. Stable Diffusion XL was trained this
way with steps of 64 at an area of 1024² (Podell et al. 2023, arXiv:2307.01952, section 2.3 and appendix I);
here ratios range from 1:2 to 2:1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

STEP, FINE_STEP = 64, 8  # pixels; the fine step is one latent position
FINE_BELOW = 512  # resolution below which a step of 64 pixels would leave few ratios
MAX_RATIO = 2
LATENT_PIXELS = 8  # pixels per latent position along a side, in Stable Diffusion XL's VAE


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Transformation of an image to its bucket's size: resize to cover the bucket, then center crop."""

    width: int  # width of the bucket
    height: int
    resized_width: int
    resized_height: int
    left: int  # left edge of the crop in the resized image
    top: int


@cache
def buckets(resolution: int) -> tuple[tuple[int, int], ...]:
    """Return width and height of every bucket of a resolution, narrowest first."""
    step = FINE_STEP if resolution < FINE_BELOW else STEP
    area, side = resolution * resolution, resolution // step * step
    largest = {(1, 1): (side, side)}  # by ratio
    for short in range(step, resolution + 1, step):
        long = min(area // short // step, MAX_RATIO * short // step) * step
        for size in ((short, long), (long, short)):
            divisor = math.gcd(*size)
            largest[size[0] // divisor, size[1] // divisor] = size  # `short` grows: the last is the largest
    return tuple(sorted(largest.values(), key=lambda size: size[0] / size[1]))


def bucket_of(width: int, height: int, resolution: int) -> tuple[int, int]:
    """Return width and height of the bucket with the ratio nearest to the image's, on a logarithmic scale."""
    ratio = math.log(width / height)

    def distance(size: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(size[0] / size[1]) - ratio), -size[0] * size[1]

    return min(buckets(resolution), key=distance)


def fit(width: int, height: int, resolution: int) -> Geometry:
    """Compute how an image of this size is resized and cropped."""
    bucket_width, bucket_height = bucket_of(width, height, resolution)
    if width * bucket_height >= height * bucket_width:  # wider than its bucket
        resized = max(bucket_width, round(width * bucket_height / height)), bucket_height
    else:
        resized = bucket_width, max(bucket_height, round(height * bucket_width / width))
    return Geometry(
        width=bucket_width,
        height=bucket_height,
        resized_width=resized[0],
        resized_height=resized[1],
        left=(resized[0] - bucket_width) // 2,
        top=(resized[1] - bucket_height) // 2,
    )
