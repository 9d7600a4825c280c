"""Exchange of small values between ranks as bytes of JSON: torch's object collectives would unpickle them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from estimator.untrusted import MAX_TEXT_BYTES, parse_json


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Return the JSON value of every rank, in the order of ranks; every rank calls it.

    ``device``: device of the process group's backend. Raises ValueError for bytes that are not JSON, and for
    more than ``MAX_TEXT_BYTES`` per rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = _gather(torch.tensor([len(own)], device=device))
    lengths = [int(size) for size in sizes]
    if not all(0 < length <= MAX_TEXT_BYTES for length in lengths):
        raise ValueError(f"ranks announce {lengths} bytes: not all are from 1 to {MAX_TEXT_BYTES}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = own.to(device)
    return [
        parse_json(bytes(data[:length].cpu().numpy()))
        for data, length in zip(_gather(padded), lengths, strict=True)
    ]


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors
