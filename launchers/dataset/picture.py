"""Row of an image dataset: an encoded image and its caption. Read by :mod:`launchers.images`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One validated image of a dataset with its caption."""

    caption: str
    image: bytes  # content of a PNG, JPEG or WebP file with RGB pixels
    width: int  # in pixels, upright
    height: int
    line: int = field(default=0, compare=False)  # line of the source file; 0: none
    source: int = field(default=0, compare=False)  # index of the dataset in mixture.names

    def with_source(self, source: int) -> Picture:
        """Return a copy with ``source`` as the index of its dataset."""
        return replace(self, source=source)
