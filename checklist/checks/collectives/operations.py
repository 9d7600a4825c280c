"""Collectives with buffers and values that expose wrong or partial results.

The value of element i of rank r is a hash of both, so a rank that is missing, duplicated or swapped, or a
chunk at the wrong offset, changes some element. Sums stay exactly representable in the type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checklist.analysis.busbw import uneven_parts

if TYPE_CHECKING:
    import torch

_LARGEST = 251  # prime, and exact in bfloat16, which represents integers up to 256
_EXACT = {"torch.bfloat16": 1 << 8, "torch.float32": 1 << 24}
_COMPARED = 1 << 16  # maximum number of compared elements, spread over the result, to keep comparing cheap


class Unavailable(RuntimeError):  # noqa: N818 - it is an answer
    """The backend does not have this operation (for this type)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A prepared operation, out of place so that it can be repeated."""

    run: Callable[[], Any]
    result: Callable[[], list[torch.Tensor]]
    """Received pieces of this rank; empty if it receives nothing."""
    expected: Callable[[int, torch.Tensor], torch.Tensor]
    """Expected values of a piece at the given indexes."""


def prepare(op: str, dtype: torch.dtype, elements: int, rank: int, world: int, device: torch.device) -> Work:
    """Prepare an operation; ``elements``: one rank's buffer, or its part if the size counts all ranks."""
    maker = _Builder(dtype, elements, rank, world, device)
    work: Work = getattr(maker, op)()

    def run() -> None:
        try:
            work.run()
        except (RuntimeError, ValueError) as error:
            if _unavailable(str(error)):
                raise Unavailable(str(error).splitlines()[0]) from None
            raise

    return Work(run=run if device.type == "cpu" else work.run, result=work.result, expected=work.expected)


def wrong_values(work: Work) -> int:
    """Count the wrong values among the compared ones."""
    import torch

    errors = 0
    for piece, received in enumerate(work.result()):
        count = received.numel()
        step = max(1, count // _COMPARED)
        indexes = torch.arange(0, count, step, device=received.device)
        right = work.expected(piece, indexes)
        errors += int((received.flatten()[::step].to(torch.int64) != right).sum())
        if not bool(torch.isfinite(received.flatten()[::step]).all()):
            errors = max(errors, 1)
    return errors


def _unavailable(text: str) -> bool:
    text = text.lower()
    return any(
        hint in text
        for hint in ("not support", "unsupported", "not implemented", "no backend", "invalid scalar")
    )


class _Builder:
    """Builder of buffers and calls. The root is the last rank, because faulty code tends to use rank 0."""

    def __init__(
        self, dtype: torch.dtype, elements: int, rank: int, world: int, device: torch.device
    ) -> None:
        self.dtype, self.elements, self.rank, self.world, self.device = dtype, elements, rank, world, device
        self.root = world - 1

    def values(self, rank: int, indexes: torch.Tensor, largest: int = _LARGEST) -> torch.Tensor:
        """Return values from 1 to ``largest``, by rank and index."""
        hashed = (indexes.long() + 1) * 40_503 + (rank + 1) * 2_654_435_761
        hashed = (hashed ^ (hashed >> 13)) * 1_274_126_177 & 0x7FFF_FFFF
        return (hashed >> 7) % largest + 1

    def summed(self, indexes: torch.Tensor) -> torch.Tensor:
        total = self.values(0, indexes, self.addend)
        for rank in range(1, self.world):
            total = total + self.values(rank, indexes, self.addend)
        return total

    @property
    def addend(self) -> int:
        """The largest value whose sum over all ranks is exact."""
        return max(1, min(_LARGEST, _EXACT.get(str(self.dtype), 1 << 24) // self.world))

    def buffer(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def filled(self, rank: int, count: int, largest: int = _LARGEST) -> torch.Tensor:
        import torch

        return self.values(rank, torch.arange(count, device=self.device), largest).to(self.dtype)

    def all_reduce(self) -> Work:
        import torch.distributed as dist

        # torch has it in place only: a copy would be timed too, so sums are checked on the first run alone.
        source = self.filled(self.rank, self.elements, self.addend)
        target = source.clone()
        first: list[torch.Tensor] = []

        def run() -> None:
            dist.all_reduce(target)
            if not first:
                first.append(target.clone())
                target.zero_()  # what is added from here on stays finite

        return Work(run=run, result=lambda: first, expected=lambda _, i: self.summed(i))

    def reduce(self) -> Work:
        import torch.distributed as dist

        source = self.filled(self.rank, self.elements, self.addend)
        target = source.clone()
        first: list[torch.Tensor] = []

        def run() -> None:
            dist.reduce(target, self.root)
            if not first:
                first.append(target.clone())
                target.zero_()

        results = first if self.rank == self.root else []
        return Work(run=run, result=lambda: results, expected=lambda _, i: self.summed(i))

    def broadcast(self) -> Work:
        import torch.distributed as dist

        target = self.filled(self.rank, self.elements)
        return Work(
            run=lambda: dist.broadcast(target, self.root),
            result=lambda: [target],
            expected=lambda _, i: self.values(self.root, i),
        )

    def all_gather(self) -> Work:
        import torch.distributed as dist

        source, gathered = self.filled(self.rank, self.elements), self.buffer(self.elements * self.world)
        return Work(
            run=lambda: dist.all_gather_into_tensor(gathered, source),
            result=lambda: list(gathered.chunk(self.world)),
            expected=lambda piece, i: self.values(piece, i),
        )

    def gather(self) -> Work:
        import torch.distributed as dist

        source = self.filled(self.rank, self.elements)
        outputs = [self.buffer(self.elements) for _ in range(self.world)] if self.rank == self.root else None
        return Work(
            run=lambda: dist.gather(source, outputs, self.root),
            result=lambda: outputs or [],
            expected=lambda piece, i: self.values(piece, i),
        )

    def scatter(self) -> Work:
        import torch.distributed as dist

        target, inputs = self.buffer(self.elements), None
        if self.rank == self.root:
            inputs = [self.filled(rank, self.elements) for rank in range(self.world)]
        return Work(
            run=lambda: dist.scatter(target, inputs, self.root),
            result=lambda: [target],
            expected=lambda _, i: self.values(self.rank, i),
        )

    def reduce_scatter(self) -> Work:
        import torch.distributed as dist

        source = self.filled(self.rank, self.elements * self.world, self.addend)
        target = self.buffer(self.elements)
        return Work(
            run=lambda: dist.reduce_scatter_tensor(target, source),
            result=lambda: [target],
            expected=lambda _, i: self.summed(i + self.rank * self.elements),
        )

    def all_to_all(self) -> Work:
        import torch.distributed as dist

        source = self.filled(self.rank, self.elements * self.world)
        target = self.buffer(self.elements * self.world)
        return Work(
            run=lambda: dist.all_to_all_single(target, source),
            result=lambda: list(target.chunk(self.world)),
            expected=lambda piece, i: self.values(piece, i + self.rank * self.elements),
        )

    def all_to_all_v(self) -> Work:
        """Send parts of different sizes to each rank, as in mixtures of experts."""
        import torch
        import torch.distributed as dist

        row = uneven_parts(self.elements, self.world)
        # By rank: what it sends to each, and where in its buffer the part for this rank begins
        splits = [[row[(dst - src) % self.world] for dst in range(self.world)] for src in range(self.world)]
        begins = [sum(sizes[: self.rank]) for sizes in splits]
        sizes, receive_sizes = splits[self.rank], [sizes[self.rank] for sizes in splits]
        source = self.filled(self.rank, sum(sizes))
        target = self.buffer(sum(receive_sizes))
        return Work(
            run=lambda: dist.all_to_all_single(target, source, receive_sizes, sizes),
            result=lambda: list(torch.split(target, receive_sizes)),
            expected=lambda piece, i: self.values(piece, i + begins[piece]),
        )

    def send_recv(self) -> Work:
        """Send to the next rank and receive from the previous one."""
        import torch.distributed as dist

        source, target = self.filled(self.rank, self.elements), self.buffer(self.elements)
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world

        def run() -> None:
            if self.world == 1:
                target.copy_(source)
                return
            transfers = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
            for request in dist.batch_isend_irecv(transfers):
                request.wait()

        return Work(run=run, result=lambda: [target], expected=lambda _, i: self.values(before, i))

    def barrier(self) -> Work:
        import torch.distributed as dist

        devices = [self.device.index] if self.device.type == "cuda" else None
        return Work(run=lambda: dist.barrier(device_ids=devices), result=list, expected=lambda _, i: i)
