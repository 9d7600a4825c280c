"""The sizes that images are trained in: as many pixels as the resolution has, in several aspect ratios.

The rule is that of NovelAI ("NovelAI Improvements on Stable Diffusion", 2022, section "Aspect Ratio
Bucketing"): for each width the greatest height that keeps the area, both multiples of a step, and the same
with width and height exchanged; an image belongs to the size of the nearest ratio. Stable Diffusion XL was
trained so with steps of 64 at an area of 1024² (Podell et al. 2023, arXiv:2307.01952, section 2.3 and
appendix I); ratios go from 1:2 to 2:1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

STEP, FINE_STEP = 64, 8  # pixels; the fine one is a latent's
FINE_BELOW = 512  # resolution, at which 64 pixels would leave few ratios
MAX_RATIO = 2
LATENT_PIXELS = 8  # of an image's side, that are one of its latents': Stable Diffusion XL's VAE


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """How an image becomes one of its bucket's size: resized until it covers that, then cut in the middle."""

    width: int  # of the bucket
    height: int
    resized_width: int
    resized_height: int
    left: int  # of what is kept, in the resized image
    top: int


@cache
def buckets(resolution: int) -> tuple[tuple[int, int], ...]:
    """Width and height of every bucket of a resolution, the narrowest first."""
    step = FINE_STEP if resolution < FINE_BELOW else STEP
    area, side = resolution * resolution, resolution // step * step
    largest = {(1, 1): (side, side)}  # of each ratio
    for short in range(step, resolution + 1, step):
        long = min(area // short // step, MAX_RATIO * short // step) * step
        for size in ((short, long), (long, short)):
            divisor = math.gcd(*size)
            largest[size[0] // divisor, size[1] // divisor] = size  # `short` grows: the last is the largest
    return tuple(sorted(largest.values(), key=lambda size: size[0] / size[1]))


def bucket_of(width: int, height: int, resolution: int) -> tuple[int, int]:
    """Width and height of the bucket whose ratio is nearest to an image's, on the scale of logarithms."""
    ratio = math.log(width / height)

    def distance(size: tuple[int, int]) -> tuple[float, int]:
        return abs(math.log(size[0] / size[1]) - ratio), -size[0] * size[1]

    return min(buckets(resolution), key=distance)


def fit(width: int, height: int, resolution: int) -> Geometry:
    """How an image of this size is resized and cut."""
    across, down = bucket_of(width, height, resolution)
    if width * down >= height * across:  # wider than its bucket
        resized = max(across, round(width * down / height)), down
    else:
        resized = across, max(down, round(height * across / width))
    return Geometry(
        width=across,
        height=down,
        resized_width=resized[0],
        resized_height=resized[1],
        left=(resized[0] - across) // 2,
        top=(resized[1] - down) // 2,
    )
