"""Phase 2: what a rank can do alone, while the others of its node do the same."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checklist.checks import LOCALS
from checklist.measurements import Local, to_dict

if TYPE_CHECKING:
    import torch

    from checklist.probes.worker import Worker

_CPU_ORDER = 512  # of the matrices on CPU: enough to be limited by arithmetic, over in milliseconds
_CUDA_ORDER = 8192  # as for the figures that the thresholds come from (MAMF, ml-engineering)
_CPU_COPY_BYTES = 64 << 20
_CUDA_COPY_BYTES = 2 << 30
_HOST_COPY_BYTES = 256 << 20
_CPU_S = 0.5  # on CPUs the load is a sample, not a burn-in
_COPIES = 10
_FEWEST = 5


def measure(
    worker: Worker, device: str, checks: list[str], load_s: float, storage_bytes: int, directory: str | None
) -> list[dict[str, Any]]:
    """Those of the checks gemm, hbm, host-copy, peer-copy and storage that are asked for, as Locals."""
    import torch

    on_gpu = device == "cuda"
    where = torch.device("cuda", worker.local_rank) if on_gpu else torch.device("cpu")
    found: list[Local] = []

    def figure(what: str, samples: Callable[[], list[float]], peer: int | None = None) -> None:
        worker.progress.name(what)
        worker.progress.begin()
        problem: str | None = None
        try:
            values = samples()
        except (RuntimeError, OSError) as error:
            first = (str(error).splitlines() or [""])[0]
            values, problem = [], f"{type(error).__name__}: {first}"
        found.append(
            Local(
                rank=worker.rank,
                what=what,
                value=statistics.median(values) if values else None,
                unit=LOCALS[what].unit,
                samples=tuple(values),
                peer=peer,
                error=problem,
            )
        )

    if "gemm" in checks:
        dtypes = {"gemm_bf16": torch.bfloat16} if on_gpu else {"gemm_fp32": torch.float32}
        for name, dtype in dtypes.items():
            figure(name, partial(_products, where, dtype, load_s if on_gpu else _CPU_S))
    if "hbm" in checks:
        size = _CUDA_COPY_BYTES if on_gpu else _CPU_COPY_BYTES
        figure("hbm_copy" if on_gpu else "memory_copy", lambda: _copies(where, where, size, both=True))
    if on_gpu and "host-copy" in checks:
        host = torch.device("cpu")
        figure("h2d", lambda: _copies(host, where, _HOST_COPY_BYTES))
        figure("d2h", lambda: _copies(where, host, _HOST_COPY_BYTES))
    if on_gpu and "peer-copy" in checks:
        for other in range(torch.cuda.device_count()):
            if other != worker.local_rank:
                peer = worker.rank - worker.local_rank + other
                there = torch.device("cuda", other)
                figure("peer_copy", partial(_copies, where, there, _HOST_COPY_BYTES), peer)
    if "storage" in checks and worker.local_rank == 0:
        _storage(figure, Path(directory or tempfile.gettempdir()), storage_bytes)
    return [to_dict(one) for one in found]


def _products(where: torch.device, dtype: torch.dtype, seconds: float) -> list[float]:
    """TFLOPS of square matrix products, one after the other for that long."""
    import torch

    order = _CUDA_ORDER if where.type == "cuda" else _CPU_ORDER
    left = torch.randn(order, order, device=where, dtype=dtype)
    right = torch.randn(order, order, device=where, dtype=dtype)
    out = torch.empty(order, order, device=where, dtype=dtype)
    flops = 2 * order**3
    for _ in range(3):
        torch.matmul(left, right, out=out)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < _FEWEST or time.perf_counter() < deadline:
        took = _timed(where, lambda: torch.matmul(left, right, out=out))
        samples.append(flops / took / 1e12)
    stride = max(1, len(samples) // 1000)  # a burn of ten minutes makes many
    return samples[::stride]


def _copies(source: torch.device, target: torch.device, size: int, *, both: bool = False) -> list[float]:
    """GB/s of copies; ``both`` counts what is read and what is written, as BabelStream does."""
    import torch

    def buffer(device: torch.device) -> torch.Tensor:
        pinned = device.type == "cpu" and "cuda" in (source.type, target.type)
        return torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    give, take = buffer(source), buffer(target)
    where = source if source.type == "cuda" else target
    take.copy_(give)
    factor = 2 if both else 1
    return [
        factor * size / _timed(where, lambda: take.copy_(give, non_blocking=True)) / 1e9
        for _ in range(_COPIES)
    ]


def _timed(where: torch.device, work: Callable[[], Any]) -> float:
    import torch

    if where.type == "cuda":
        torch.cuda.synchronize(where)
    begin = time.perf_counter()
    work()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter() - begin


def _storage(figure: Callable[[str, Callable[[], list[float]]], None], directory: Path, size: int) -> None:
    """Write with fsync, then read past the page cache. The file is gone afterwards, whatever happens."""
    with _scratch(directory) as path:
        figure("storage_write", lambda: [_write(path, size)])
        if path.exists() and path.stat().st_size:
            figure("storage_read", lambda: [_read_back(path)])


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    path = directory / f".checklist-{os.getpid()}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int) -> float:
    block = os.urandom(1 << 20)  # a compressing file system can't make it smaller
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size / (time.perf_counter() - begin) / 1e9


def _read_back(path: Path) -> float:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while file.read(1 << 20):
            pass
    return path.stat().st_size / (time.perf_counter() - begin) / 1e9
