"""Preparation of images for training: bucket assignment, the order of the run, and files."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from estimator.errors import UserError
from estimator.formatting import format_count
from launchers.dataset.picture import Picture
from launchers.dataset.prepared import PreparedInfo
from launchers.dataset.progress import Progress
from launchers.images import buckets
from launchers.images.order import count_batches, in_batches
from launchers.images.prepared import PreparedImages, Writer, positions_of
from launchers.settings import Settings

TASK = "text-to-image"


def prepare(
    pictures: Sequence[Picture],
    folder: Path,
    *,
    settings: Settings,
    model_name_or_fingerprint: str,
    resolution: int,
    held_out: Sequence[Picture] = (),
) -> PreparedInfo:
    """Write ``folder`` (see prepared.py), and ``folder``/heldout for held-out images, if there are any.

    The held-out folder has one image per step, in the given order. Raises UserError if no bucket has enough
    images for a batch.
    """
    shutil.rmtree(folder / "heldout", ignore_errors=True)
    with Writer(folder) as writer:
        content = _add(pictures, writer, resolution)
        order = _order(_numbers(writer.geometry), settings)
        info = _info(writer.geometry, order, content, model_name_or_fingerprint, settings, resolution)
        writer.finish(order, info)
    if held_out:
        single_image = settings.model_copy(update={"global_batch_size": 1})
        with Writer(folder / "heldout") as writer:
            content = _add(held_out, writer, resolution)
            order = np.arange(len(held_out), dtype=np.int32)
            eval_info = _info(
                writer.geometry, order, content, model_name_or_fingerprint, single_image, resolution
            )
            writer.finish(order, eval_info)
    return info


def summary(info: PreparedInfo, folder: Path, name: str) -> str:
    """Summarize the dataset's buckets in one line, most frequent first."""
    sizes, counts = np.unique(PreparedImages(folder).geometry[:, 4:6], axis=0, return_counts=True)
    by_count = np.argsort(-counts, kind="stable")
    summary = ", ".join(f"{sizes[index, 1]}x{sizes[index, 0]}: {counts[index]:,}" for index in by_count)
    unit = "bucket" if len(counts) == 1 else "buckets"
    return f"{name}: {info.rows:,} images in {len(counts)} {unit} (width x height: images): {summary}"


def _add(pictures: Sequence[Picture], writer: Writer, resolution: int) -> str:
    """Append all images; return a SHA-256 over images, captions and crops."""
    digest = hashlib.sha256(TASK.encode())
    progress = Progress("writing", len(pictures), "images")
    for number, picture in enumerate(pictures):
        writer.add(picture, buckets.fit(picture.width, picture.height, resolution))
        for part in (picture.caption.encode(), picture.image):
            digest.update(len(part).to_bytes(8, "big") + part)
        progress.at(number)
    digest.update(writer.geometry.tobytes())
    return digest.hexdigest()


def _numbers(geometry: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return [rows]: bucket number of each row."""
    return np.unique(geometry[:, 4:6], axis=0, return_inverse=True)[1].reshape(-1)


def _order(numbers: NDArray[np.int64], settings: Settings) -> NDArray[np.int32]:
    steps, epochs = _steps(numbers, settings), _epochs(numbers, settings)
    return in_batches(numbers, epochs, settings.batch_size, seed=settings.seed, max_batches=steps)


def _steps(numbers: NDArray[np.int64], settings: Settings) -> int:
    epochs = _epochs(numbers, settings)
    steps = count_batches(numbers, epochs, settings.batch_size)
    if not steps:
        largest = int(np.bincount(numbers).max()) if len(numbers) else 0
        raise UserError(
            f"global_batch_size {settings.batch_size}: no aspect ratio has a full batch among "
            f"{len(numbers):,} images in {format_count(epochs, 'epoch')}; "
            f"the largest bucket has {largest:,}.",
            f"Use --global-batch-size {max(1, largest)} or less, or more data.",
        )
    return min(steps, settings.max_steps or steps)


def _epochs(numbers: NDArray[np.int64], settings: Settings) -> int:
    """Return the passes over the data: as set, else the fewest with one step, or with ``max_steps`` steps."""
    if settings.epochs is not None or not len(numbers):
        return settings.epochs or 1
    steps = settings.max_steps or 1
    return next(epochs for epochs in count(1) if count_batches(numbers, epochs, settings.batch_size) >= steps)


def _info(
    geometry: NDArray[np.int32],
    order: NDArray[np.int32],
    content: str,
    model: str,
    settings: Settings,
    resolution: int,
) -> PreparedInfo:
    positions = positions_of(geometry)
    digest = hashlib.sha256(f"{content} {model} {resolution} {settings.batch_size}".encode())
    digest.update(order.tobytes())
    return PreparedInfo(
        rows=len(geometry),
        tokens=int(positions.sum()),
        label_tokens=int(positions.sum()),
        truncated_rows=0,
        longest_row=int(positions.max()),
        seq_len=(resolution // buckets.LATENT_PIXELS) ** 2,
        packed=False,
        pad_id=0,
        vocab_size=0,
        global_batch_size=settings.batch_size,
        total_steps=len(order) // settings.batch_size,
        seed=settings.seed,
        fingerprint=digest.hexdigest(),
        documents=len(geometry),
        task=TASK,
        shortest=int(positions.min()),
        median=int(np.median(positions)),
        p95=int(np.percentile(positions, 95)),
        longest=int(positions.max()),
        content=content,
    )
