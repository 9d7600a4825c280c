"""Merge of an adapter into a model's files, one tensor at a time.

Each tensor is mapped from the base's file, changed and written before the next one is mapped, and sums are
computed for a block of rows at a time. Memory holds the largest matrix once, whatever the size of the model.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from launchers.models.hf_layout import safetensors_header

# Time limit of the ranks that wait for the merging rank: 70 B parameters in 16 bits take 20 minutes on a disk
# that writes 125 MiB/s (gp3's baseline). Hangs are detected earlier, by missing telemetry.
LIMIT = timedelta(hours=2)

# Values per block: 16 MiB in fp32. A block has a multiple of 64 rows, because MKL computes the last rows of
# other blocks with other kernels, which round differently (in fp32).
BLOCK = 4 * 2**20
_ROWS = 64

Change = Callable[[str, torch.Tensor], torch.Tensor | None]

# https://huggingface.co/docs/safetensors/metadata_parsing; other types are written unchanged
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def merge(base: Sequence[Path], destination: Path, change: Change) -> None:
    """Write the safetensors files ``base`` with changed tensors into ``destination``, which is emptied first.

    ``change`` receives each tensor's name and values, which it must not modify. It returns the new values (on
    the CPU), or None to leave the tensor out. Each file keeps its name, and appears complete or not at all.
    """
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for path in base:
        unfinished = destination / f"{path.name}.tmp"
        try:
            _write(path, unfinished, change)
            unfinished.rename(destination / path.name)
        finally:
            unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Update of one matrix W of the base: W + scale B A.

    With magnitudes m, each row becomes m (W + scale B A) / ||W + scale B A||: DoRA, Liu et al. 2024
    (arXiv:2402.09353), equation 5, with one magnitude per output, as in PEFT.
    """

    lora_a: torch.Tensor  # A, [rank, in]
    lora_b: torch.Tensor  # B, [out, rank]
    scale: float
    magnitudes: torch.Tensor | None  # m, [out]

    def applied_to(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the updated matrix in the type of ``weight``; computed in fp32, by blocks of rows."""
        lora_a = self.lora_a.float()

        def updated_rows(rows: slice) -> torch.Tensor:
            total = (self.lora_b[rows].float() @ lora_a).mul_(self.scale).add_(weight[rows])
            if self.magnitudes is not None:
                length = torch.linalg.vector_norm(total, dim=1)
                total.mul_((self.magnitudes[rows].float() / length)[:, None])
            return total

        return by_rows(weight, updated_rows)


def by_rows(weight: torch.Tensor, change: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Build a matrix like ``weight`` from the rows that ``change`` returns for each slice of rows."""
    result = torch.empty_like(weight)
    for rows in blocks(weight):
        result[rows] = change(rows)
    return result


def blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Yield a matrix's rows in slices whose fp32 copy is small."""
    step = max(1, BLOCK // weight.shape[1] // _ROWS) * _ROWS
    for first in range(0, len(weight), step):
        yield slice(first, first + step)


def _write(source: Path, target: Path, change: Change) -> None:
    """Write one file: 8 bytes of header length, little-endian, a JSON header padded with spaces, the data."""
    source_header = safetensors_header(source)
    header: dict[str, Any] = {}
    with safe_open(source, framework="pt") as file:
        header["__metadata__"] = file.metadata() or {"format": "pt"}
    with target.open("wb") as output:
        header_bytes = len(
            _as_json(
                header
                | {name: _entry("F8_E4M3FNUZ", e["shape"], 10**18) for name, e in source_header.items()}
            )
        )
        output.seek(8 + header_bytes)
        end = 0
        for name, entry in sorted(source_header.items(), key=lambda item: item[1]["data_offsets"]):
            with safe_open(
                source, framework="pt"
            ) as file:  # reopened for each tensor: pages stay mapped while it is open
                tensor = file.get_tensor(name)
                updated = change(name, tensor)
                if updated is None:
                    continue
                kind = entry["dtype"] if updated.dtype == tensor.dtype else _NAMES[updated.dtype]
                values = updated.contiguous().reshape(-1).view(torch.uint8).numpy()
                header[name] = _entry(kind, list(updated.shape), end, values.nbytes)
                end += values.nbytes
                output.write(values.data)
                del tensor, updated, values
        output.seek(0)
        output.write(struct.pack("<Q", header_bytes) + _as_json(header).ljust(header_bytes))


def _entry(dtype: str, shape: list[int], start: int, size: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def _as_json(header: dict[str, Any]) -> bytes:
    """Format a header, padded so that the data after it begins at a multiple of 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)
