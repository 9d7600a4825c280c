"""Result of a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One phase of the training step: its largest sum of live bytes, by category."""

    name: str
    parts: tuple[tuple[str, int], ...]  # category of estimator.memory -> bytes

    @property
    def total_bytes(self) -> int:
        """Sum of the categories."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactEstimate:
    """Live bytes of one process over one training step, from a trace of the real modules.

    Comparable with ``estimator.memory.active``: active memory of torch.cuda, without the CUDA context, NCCL
    and fragmentation.
    """

    moments: tuple[Moment, ...]  # in the order of the step
    states: tuple[tuple[str, int], ...]  # weights, adapters, gradients and optimizer states together
    parameters: int  # of the complete model, including adapters
    trainable_parameters: int
    from_formula: tuple[str, ...]  # categories that were computed, not traced
    unmodeled: tuple[str, ...]  # each a clause
    seconds: float
    versions: tuple[tuple[str, str], ...]  # package -> version traced

    @property
    def peak(self) -> Moment:
        """Phase of the step with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the peak."""
        return self.peak.total_bytes

    @property
    def categories(self) -> dict[str, int]:
        """Categories at the peak, as in ``estimator.memory.active``."""
        return dict(self.peak.parts)
