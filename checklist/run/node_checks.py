"""Phase 2: single-rank measurements, run concurrently on all ranks of a node."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from checklist.analysis.busbw import algbw
from checklist.checks.gpu import load_probe, pcie
from checklist.checks.network import efa_probe
from checklist.checks.storage import storage_probe
from checklist.measurements import Local, to_dict
from checklist.probing.context import Context
from checklist.registry import LOCALS

if TYPE_CHECKING:
    import torch

_CPU_ORDER = 512  # matrix order on CPUs: compute-bound, and done in milliseconds
_CUDA_ORDER = 8192  # matrix order used by the source of the thresholds (MAMF, ml-engineering)
_CPU_COPY_BYTES = 64 << 20
_NODE_COPY_BYTES = 1 << 30  # of host memory on a GPU node, larger than the caches of its processors
_CUDA_COPY_BYTES = 2 << 30
_HOST_COPY_BYTES = 256 << 20
_CPU_S = 0.5  # on CPUs the load is a sample, not a burn-in
_COPIES = 10
_FEWEST = 5
_WARM_UP = 3
_BURST, _FASTEST = 20, 5  # products; 20 are 28 ms on an H200, which lowers its clocks after about as long
_NEED_TORCH = {"gemm", "gpu-load", "hbm", "host-copy", "peer-copy"}  # only these import torch, which is slow


def measure(
    context: Context, device: str, checks: list[str], load_s: float, folders: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure the requested checks among gemm, hbm, host-copy, peer-copy and efa, plus storage, as Locals.

    The load of gemm also serves check gpu-load.

    ``folders``: arguments of :func:`checklist.checks.storage.storage_probe.measure` on a node's first rank.
    """
    figures: list[Local] = []

    def record_with_note(
        what: str, sampled: Callable[[], storage_probe.Sampled], peer: int | None = None
    ) -> None:
        context.progress.name(what)
        context.progress.begin()
        problem = note = None
        try:
            values, note = sampled()
        except (RuntimeError, OSError) as error:
            first_line = (str(error).splitlines() or [""])[0]
            # Storage raises OSError itself with a full message; the messages of others need their type
            prefix = "" if type(error) is OSError else f"{type(error).__name__}: "
            values, problem = [], f"{prefix}{first_line}"
        figures.append(
            Local(
                rank=context.rank,
                what=what,
                value=statistics.median(values) if values else None,
                unit=LOCALS[what].unit,
                samples=tuple(values),
                peer=peer,
                error=problem,
                note=note,
            )
        )

    def record(what: str, samples: Callable[[], list[float]], peer: int | None = None) -> None:
        record_with_note(what, lambda: (samples(), None), peer)

    if _NEED_TORCH & set(checks):
        _compute(context, device == "cuda", checks, load_s, record)
    if context.local_rank == 0:
        if "efa" in checks and efa_probe.devices():
            record_with_note("efa_loopback", lambda: efa_probe.loopback(context.progress.begin))
        storage_probe.measure(record_with_note, **folders)
    return [to_dict(item) for item in figures]


def _compute(
    context: Context, on_gpu: bool, checks: list[str], load_s: float, record: Callable[..., None]
) -> None:
    """Measure the matmul throughput of the processor or GPU."""
    import torch

    where = torch.device("cuda", context.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu and {"gemm", "gpu-load"} & set(checks):
        with load_probe.watched(context):
            record("gemm_bf16", partial(_burst, where, torch.bfloat16))
            record("gemm_bf16_sustained", partial(_load, where, torch.bfloat16, load_s))
    elif "gemm" in checks:
        record("gemm_fp32", partial(_load, where, torch.float32, _CPU_S))
    if "hbm" in checks:
        size = _CUDA_COPY_BYTES if on_gpu else _CPU_COPY_BYTES
        record("hbm_copy" if on_gpu else "memory_copy", lambda: _copies(where, where, size, both_ways=True))
    if on_gpu and "host-limits" in checks and context.local_rank == 0:
        cpu = torch.device("cpu")
        record("memory_copy", lambda: _copies(cpu, cpu, _NODE_COPY_BYTES, both_ways=True))
    if on_gpu and "host-copy" in checks:
        host = torch.device("cpu")
        for what, source, target in (("h2d", host, where), ("d2h", where, host)):
            with pcie.turn(context):
                record(what, partial(_copies, source, target, _HOST_COPY_BYTES))
    if on_gpu and "peer-copy" in checks:
        for other in range(torch.cuda.device_count()):
            if other != context.local_rank:
                peer = context.rank - context.local_rank + other
                peer_device = torch.device("cuda", other)
                record("peer_copy", partial(_copies, where, peer_device, _HOST_COPY_BYTES), peer)


def _burst(where: torch.device, dtype: torch.dtype) -> list[float]:
    """Measure TFLOPS of the fastest of a few matmuls, before the power limit lowers the clocks.

    Follows mamf-finder (version 4, stas00/ml-engineering@0359db8), the source of the thresholds: the median
    of the five fastest iterations of a burst after an idle gap.
    """
    product = _product(where, dtype)
    return sorted(product() for _ in range(_BURST))[-_FASTEST:]


def _load(where: torch.device, dtype: torch.dtype, seconds: float) -> list[float]:
    """Measure TFLOPS of consecutive matmuls for ``seconds``. A GPU at its power limit lowers its clocks.

    On an H200 at 690 of 700 W that was 14 % below the burst (benchmarks/results/products_nvidia_h200.md).
    """
    product = _product(where, dtype)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < _FEWEST or time.perf_counter() < deadline:
        samples.append(product())
    stride = max(1, len(samples) // 1000)  # a ten-minute burn-in produces many samples
    return samples[::stride]


def _product(where: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """Build a function that multiplies two square matrices of normal numbers and returns its TFLOPS."""
    import torch

    order = _CUDA_ORDER if where.type == "cuda" else _CPU_ORDER
    a = torch.randn(order, order, device=where, dtype=dtype)
    b = torch.randn(order, order, device=where, dtype=dtype)
    out = torch.empty(order, order, device=where, dtype=dtype)
    flops = 2 * order**3

    def product() -> float:
        took = _timed(where, lambda: torch.matmul(a, b, out=out))
        return flops / took / 1e12 if took else math.inf

    for _ in range(_WARM_UP):
        product()
    return product


def _copies(source: torch.device, target: torch.device, size: int, *, both_ways: bool = False) -> list[float]:
    """Measure GB/s of copies; ``both_ways`` counts bytes read and written, like BabelStream."""
    import torch

    def buffer(device: torch.device) -> torch.Tensor:
        pinned = device.type == "cpu" and "cuda" in (source.type, target.type)
        return torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    outgoing, incoming = buffer(source), buffer(target)
    where = source if source.type == "cuda" else target
    incoming.copy_(outgoing)
    factor = 2 if both_ways else 1
    return [
        algbw(factor * size, _timed(where, lambda: incoming.copy_(outgoing, non_blocking=True)))
        for _ in range(_COPIES)
    ]


def _timed(where: torch.device, operation: Callable[[], Any]) -> float:
    import torch

    if where.type == "cuda":
        torch.cuda.synchronize(where)
    start = time.perf_counter()
    operation()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - start
