"""Exact mode against published measurements of active memory.

    python -m benchmarks.exact_anchors      # a minute, no GPU; writes benchmarks/results/exact_anchors.*

Traces every published peak of active memory with quality A in benchmarks/published/data/measured.csv that
exact mode supports. A trace reflects the installed code; if the measured release is known to have kept other
tensors, the run is traced again with that release's behavior patched in.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.machine import describe
from benchmarks.published import rows
from benchmarks.published.rows import PublishedRow
from estimator.exact.support import untraceable
from estimator.exact.torchtune_imports import torchtune_imports
from estimator.plan import GIB

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """One published peak of active memory and its trace, with and without the measured version's code."""

    id: str
    source: str
    step: str
    measured_gib: float
    traced_gib: float
    traced_original_gib: float | None
    original_code: str
    seconds: float

    @property
    def error(self) -> float:
        return (self.traced_original_gib or self.traced_gib) / self.measured_gib - 1


@contextmanager
def norm_of_torchtune_04() -> Iterator[None]:
    """Compute torchtune 0.4's RMSNorm (modules/rms_norm.py): the weight is applied in the input's type."""
    import torch

    with torchtune_imports():
        from torchtune.modules import RMSNorm

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        fp32 = x.float()
        normed: torch.Tensor = (fp32 * torch.rsqrt(fp32.pow(2).mean(-1, keepdim=True) + norm.eps)).type_as(x)
        scale: torch.Tensor = norm.scale
        return normed * scale

    with mock.patch.object(RMSNorm, "forward", forward):
        yield


@contextmanager
def logits_alive() -> Iterator[None]:
    """Keep the fp32 logits through the backward pass, as ``pred`` of torchtitan's first train.py did."""
    from torch.nn import functional

    held: list[Any] = []
    plain = functional.cross_entropy

    def cross_entropy(logits: Any, labels: Any) -> Any:
        held[:] = [logits]
        return plain(logits, labels)

    with mock.patch.object(functional, "cross_entropy", cross_entropy):
        yield


def original_code(row: PublishedRow) -> tuple[str, Callable[[], Any]]:
    """Return how the measured version's code differs, as text and as a patch; empty if unknown."""
    assert row.setup is not None
    if row.source.startswith("pytorch/torchtune@1814feb17") and not row.setup.compile:
        return "RMSNorm of torchtune 0.4", norm_of_torchtune_04
    if row.source.startswith("pytorch/torchtitan@83c879f18"):
        return "fp32 logits kept through the backward pass", logits_alive
    return "", nullcontext


def anchor(row: PublishedRow) -> Anchor:
    from estimator.exact.trace import trace

    setup, (difference, patch) = row.setup, original_code(row)
    assert setup is not None
    assert row.gib is not None
    current = trace(setup)
    with patch():
        original = trace(setup) if difference else None
    split = f"{setup.sharding} {setup.shard}" if setup.world_size > 1 else "one GPU"
    split += f", tensor {setup.tensor}" if setup.tensor > 1 else ""
    kind = f"{setup.method}{'' if setup.quantization == 'none' else ' ' + setup.quantization}"
    extra = ", compiled" if setup.compile else ""
    return Anchor(
        id=row.id,
        source=row.source,
        step=f"{setup.model.name} {kind}, {setup.micro_batch_size} x {setup.seq_len}, {split}, checkpointing "
        f"{setup.checkpointing}, {setup.loss} loss{extra}",
        measured_gib=row.gib,
        traced_gib=round(_peak(current), 2),
        traced_original_gib=None if original is None else round(_peak(original), 2),
        original_code=difference,
        seconds=round(current["seconds"], 1),
    )


def _peak(estimate: dict[str, Any]) -> float:
    return float(max(sum(parts.values()) for parts in estimate["moments"].values()) / GIB)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    peak = [row for row in rows.read(rows.TABLE) if row.kind == "active" and row.gib and row.quality == "A"]
    anchors = [anchor(row) for row in peak if row.setup and untraceable(row.setup) is None]
    machine = describe()
    values = {"machine": machine, "anchors": [asdict(each) | {"error": each.error} for each in anchors]}
    (RESULTS / "exact_anchors.json").write_text(json.dumps(values, indent=1) + "\n")
    (RESULTS / "exact_anchors.md").write_text(page(anchors, machine["text"]))


def page(anchors: list[Anchor], machine: str) -> str:
    lines = [
        "# Exact mode against published active memory",
        "",
        f"`python -m benchmarks.exact_anchors`, {machine}",
        "",
        "| row | step | measured, GiB | traced, GiB | as the code was, GiB | error | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in anchors:
        was = "" if each.traced_original_gib is None else f"{each.traced_original_gib} ({each.original_code})"
        lines.append(
            f"| {each.id} | {each.step} | {each.measured_gib} | {each.traced_gib} | {was} | "
            f"{each.error:+.1%} | {each.seconds} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
