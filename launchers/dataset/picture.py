"""A row of a data set of pictures: an encoded image and its caption. Read by :mod:`launchers.images`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One image of a dataset, checked, and what it shows in words."""

    caption: str
    image: bytes  # of a PNG, JPEG or WebP file whose pixels are RGB
    width: int  # in pixels, as the image is seen
    height: int
    line: int = field(default=0, compare=False)  # of the file it came from; 0: none
    source: int = field(default=0, compare=False)  # which dataset of the run, as mixture.names counts them

    def of_source(self, source: int) -> Picture:
        """The same, of that dataset of the run."""
        return replace(self, source=source)
