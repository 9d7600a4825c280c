"""Phase 2: repeated matmuls, compared bitwise.

Two kinds of operands. Random numbers exercise all bits of the arithmetic; their product is reproducible on
one device, as cuBLAS and oneDNN guarantee for one stream and a fixed number of threads. Small integers have
exact sums in any order, so their product is the same on every device.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from checklist.measurements import Repeated, to_dict
from checklist.probing.context import Context

if TYPE_CHECKING:
    import torch

_CPU_ORDER, _CUDA_ORDER = 512, 8192  # same as for the timed matmuls
_LARGEST = 8  # largest integer: sums of 8192 products stay below 2**24, exact in fp32
_SEED = 20_260_101  # any, but the same on all ranks
_FEWEST = 8  # minimum number of repetitions


def repeat(context: Context, device: str, seconds: float) -> list[dict[str, Any]]:
    """Repeat matmuls with both kinds of operands for ``seconds`` in total; return Repeated records."""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums stay exact
    where = torch.device("cuda", context.local_rank) if device == "cuda" else torch.device("cpu")
    return [
        to_dict(_repeated(context, where, integers=integers, seconds=seconds / 2, make=make))
        for integers, make in ((False, _random), (True, _integers))
    ]


def _random(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=generator)


def _integers(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator).float()


def _repeated(
    context: Context, where: torch.device, *, integers: bool, seconds: float, make: Any
) -> Repeated:
    import torch

    cuda = where.type == "cuda"
    order, dtype = (_CUDA_ORDER, torch.bfloat16) if cuda else (_CPU_ORDER, torch.float32)
    generator = torch.Generator().manual_seed(_SEED)
    left, right = (make((order, order), generator).to(where, dtype) for _ in range(2))
    first = torch.matmul(left, right)
    out = torch.empty_like(first)
    bits = torch.int16 if cuda else torch.int32
    differing = times = 0
    deadline = time.perf_counter() + seconds
    while times < _FEWEST or time.perf_counter() < deadline:
        context.progress.begin()
        torch.matmul(left, right, out=out)
        differing += int((out.view(bits) != first.view(bits)).sum())
        times += 1
    values = first.cpu().view(bits).numpy().tobytes()
    return Repeated(
        rank=context.rank,
        whole=integers,
        times=times,
        differing=differing,
        digest=hashlib.sha256(values).hexdigest()[:16],
    )
