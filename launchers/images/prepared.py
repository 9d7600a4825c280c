"""Prepared images: written once, read by every process in the same order.

The folder can also be opened by :class:`launchers.dataset.prepared.Prepared`, and contains::

    info.json            PreparedInfo; its tokens are latent positions, seq_len those of a square
    order.npy            int32 [total_steps * global_batch_size], rows in training order, one bucket per step
    offsets.npy          int64 [rows + 1], latent positions before each row
    images.bin           the rows' files (PNG, JPEG, WebP), concatenated
    image_offsets.npy    int64 [rows + 1], start of each file
    captions.jsonl       one JSON string per line
    caption_offsets.npy  int64 [rows + 1], start of each line
    geometry.npy         int32 [rows, 8]: original height and width, top and left of the crop, target height
                         and width (in this order Stable Diffusion XL's time ids), resized height and width
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

if TYPE_CHECKING:  # takes a tenth of a second to import; the flow's processes need only the names
    import numpy as np
    from numpy.typing import NDArray

_INFO = "info.json"
_TIME_IDS = 6  # number of geometry's first columns


class PreparedImages(Prepared):
    """Reader of a folder of prepared images; arrays and files are memory-mapped, so ranks share one copy."""

    @cached_property
    def geometry(self) -> NDArray[np.int32]:
        """Geometry of each row, [rows, 8]; columns: see the module's docstring."""
        return self._array("geometry")

    @cached_property
    def _images(self) -> _Records:
        return _Records(self.folder / "images.bin", self._array("image_offsets"))

    @cached_property
    def _captions(self) -> _Records:
        return _Records(self.folder / "captions.jsonl", self._array("caption_offsets"))

    def image(self, index: int) -> bytes:
        """Return the encoded file of a row."""
        return self._images[index]

    def caption(self, index: int) -> str:
        """Return the caption of a row."""
        return str(json.loads(self._captions[index]))

    def time_ids(self, index: int) -> NDArray[np.int32]:
        """Return [6]: original height and width, crop's top and left, target height and width."""
        return self.geometry[index, :_TIME_IDS]

    def target(self, index: int) -> tuple[int, int]:
        """Return height and width of the row's bucket in pixels."""
        height, width = self.geometry[index, 4:6].tolist()
        return height, width

    def resized(self, index: int) -> tuple[int, int]:
        """Return height and width that the image is resized to before the crop."""
        height, width = self.geometry[index, 6:8].tolist()
        return height, width

    def pixels(self, index: int) -> NDArray[np.float32]:
        """Return [3, height, width] in -1 to 1, the decoded image after resize (Lanczos) and crop."""
        import numpy as np
        from PIL import Image

        top, left = self.geometry[index, 2:4].tolist()
        (height, width), (resized_height, resized_width) = self.target(index), self.resized(index)
        with Image.open(io.BytesIO(self.image(index))) as image:
            scale_x, scale_y = image.width / resized_width, image.height / resized_height
            # Resize only the crop: a very narrow image would take gigabytes if resized before cropping
            box = (left * scale_x, top * scale_y, (left + width) * scale_x, (top + height) * scale_y)
            fitted = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS, box=box)
        values = np.asarray(fitted, dtype=np.float32) / 127.5 - 1
        return np.ascontiguousarray(values.transpose(2, 0, 1))


class _Records:
    """Records of a memory-mapped file."""

    def __init__(self, path: Path, offsets: NDArray[np.int32]) -> None:
        import numpy as np

        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self._offsets = offsets

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._bytes[self._offsets[index] : self._offsets[index + 1]].data)


class Writer:
    """Writer of a folder, image by image; info.json is written last, so a folder without it is incomplete."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _INFO).unlink(missing_ok=True)  # may be left by an earlier run
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
        """Geometry of the rows added so far, [rows, 8]."""
        import numpy as np

        return np.array(self._geometry, dtype=np.int32).reshape(-1, 8)

    def finish(self, order: NDArray[np.int32], info: PreparedInfo) -> None:
        """Write the files that require all rows."""
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
    """Return [rows]: number of latent positions of each row."""
    import numpy as np

    sides = geometry[:, 4:6].astype(np.int64) // LATENT_PIXELS
    positions: NDArray[np.int64] = sides[:, 0] * sides[:, 1]
    return positions


def _offsets(sizes: array[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    import numpy as np

    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
