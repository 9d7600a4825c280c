"""Prepared images: laid out once, read by every process in the same order.

A folder that :class:`launchers.dataset.prepared.Prepared` opens too, with::

    info.json            PreparedInfo, whose tokens are positions of latents, and seq_len those of a square
    order.npy            int32 [total_steps * global_batch_size], rows in training order, a step's of one
                         bucket
    offsets.npy          int64 [rows + 1], positions of latents before each row
    images.bin           the rows' files (PNG, JPEG, WebP), one after the other
    image_offsets.npy    int64 [rows + 1], where each begins
    captions.jsonl       a JSON text a line
    caption_offsets.npy  int64 [rows + 1], where each line begins
    geometry.npy         int32 [rows, 8]: original height and width, top and left of the crop, target height
                         and width (in this order Stable Diffusion XL's time ids), height and width resized to
"""

from __future__ import annotations

import dataclasses
import io
import json
from array import array
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from launchers.dataset.picture import Picture
from launchers.dataset.prepared import Prepared, PreparedInfo
from launchers.images.buckets import LATENT_PIXELS, Geometry

if TYPE_CHECKING:  # a tenth of a second to import; the flow's processes need the names only
    import numpy as np
    from numpy.typing import NDArray

_INFO = "info.json"
_TIME_IDS = 6  # of the columns of geometry


class PreparedImages(Prepared):
    """Reads a folder of prepared images; arrays and files are memory-mapped, so many ranks share one copy."""

    @cached_property
    def geometry(self) -> NDArray[np.int32]:
        """[rows, 8], as the module's text has it."""
        return self._array("geometry")

    @cached_property
    def _images(self) -> _Records:
        return _Records(self.folder / "images.bin", self._array("image_offsets"))

    @cached_property
    def _captions(self) -> _Records:
        return _Records(self.folder / "captions.jsonl", self._array("caption_offsets"))

    def image(self, index: int) -> bytes:
        """The encoded file of a row."""
        return self._images[index]

    def caption(self, index: int) -> str:
        """What the image of a row shows."""
        return str(json.loads(self._captions[index]))

    def time_ids(self, index: int) -> NDArray[np.int32]:
        """[6]: original height and width, crop's top and left, target height and width."""
        return self.geometry[index, :_TIME_IDS]

    def target(self, index: int) -> tuple[int, int]:
        """Height and width in pixels that a row is trained in: its bucket."""
        height, width = self.geometry[index, 4:6].tolist()
        return height, width

    def resized(self, index: int) -> tuple[int, int]:
        """Height and width that the image is resized to before it is cut to its bucket's."""
        height, width = self.geometry[index, 6:8].tolist()
        return height, width

    def pixels(self, index: int) -> NDArray[np.float32]:
        """[3, height, width] of the target, between -1 and 1: decoded, resized (Lanczos) and cut."""
        import numpy as np
        from PIL import Image

        top, left = self.geometry[index, 2:4].tolist()
        (height, width), (resized_height, resized_width) = self.target(index), self.resized(index)
        with Image.open(io.BytesIO(self.image(index))) as image:
            across, down = image.width / resized_width, image.height / resized_height
            # Only what is kept is resized: a narrow strip would become an image of gigabytes before the cut.
            box = (left * across, top * down, (left + width) * across, (top + height) * down)
            fitted = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS, box=box)
        values = np.asarray(fitted, dtype=np.float32) / 127.5 - 1
        return np.ascontiguousarray(values.transpose(2, 0, 1))


class _Records:
    """Pieces of a file, which is mapped into memory."""

    def __init__(self, path: Path, offsets: NDArray[np.int32]) -> None:
        import numpy as np

        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._offsets = offsets

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._bytes[self._offsets[index] : self._offsets[index + 1]].data)


class Writer:
    """Writes a folder image by image; info.json comes last, so a folder without it is not complete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _INFO).unlink(missing_ok=True)  # of an earlier run
        self._folder = folder
        self._images = (folder / "images.bin").open("wb", buffering=1 << 20)
        self._captions = (folder / "captions.jsonl").open("wb", buffering=1 << 20)
        self._sizes, self._caption_sizes = array("q"), array("q")
        self._geometry: list[tuple[int, ...]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._images.close()
        self._captions.close()

    def add(self, picture: Picture, fitted: Geometry) -> None:
        """Append a row."""
        self._images.write(picture.image)
        line = json.dumps(picture.caption).encode() + b"\n"
        self._captions.write(line)
        self._sizes.append(len(picture.image))
        self._caption_sizes.append(len(line))
        target, resized = (fitted.height, fitted.width), (fitted.resized_height, fitted.resized_width)
        self._geometry.append((picture.height, picture.width, fitted.top, fitted.left, *target, *resized))

    @property
    def geometry(self) -> NDArray[np.int32]:
        """[rows, 8] of what was added."""
        import numpy as np

        return np.array(self._geometry, dtype=np.int32).reshape(-1, 8)

    def finish(self, order: NDArray[np.int32], info: PreparedInfo) -> None:
        """Write what is known only with the last row."""
        import numpy as np

        geometry = self.geometry
        np.save(self._folder / "geometry.npy", geometry)
        np.save(self._folder / "image_offsets.npy", _offsets(self._sizes))
        np.save(self._folder / "caption_offsets.npy", _offsets(self._caption_sizes))
        np.save(self._folder / "offsets.npy", _offsets(positions_of(geometry)))
        np.save(self._folder / "order.npy", order.astype(np.int32))
        self.__exit__(None, None, None)
        (self._folder / _INFO).write_text(json.dumps(dataclasses.asdict(info), indent=1))


def positions_of(geometry: NDArray[np.int32]) -> NDArray[np.int64]:
    """[rows]: positions that each row's latents have."""
    import numpy as np

    sides = geometry[:, 4:6].astype(np.int64) // LATENT_PIXELS
    positions: NDArray[np.int64] = sides[:, 0] * sides[:, 1]
    return positions


def _offsets(sizes: array[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    import numpy as np

    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
