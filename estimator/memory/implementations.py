"""Table of the tensors that each engine's model code keeps for the backward pass.

To add an engine or to correct one, edit a row of ``data/implementations.csv``. The numbers were counted with
``torch.autograd.graph.saved_tensors_hooks`` on one real block of the code that ``source`` names.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from estimator.setup import Setup

TABLE = Path(__file__).parent.parent / "data" / "implementations.csv"
FAMILIES = TABLE.with_name("block_families.csv")


@dataclass(frozen=True, slots=True)
class Implementation:
    """One row. Bytes are for each element, where the model computes in 16 bits."""

    engine: str
    version: str  # "" is today's
    norm_input: int  # RMSNorm's input as it keeps it: 4 an fp32 copy, 2 the 16-bit input itself
    norm_output: int  # its result before the weight, which only a trained weight needs
    norm_output_fp32: int  # the same where the model computes in fp32
    expand_kv: str  # keys and values repeated for all query heads: "always", "padded" (with a mask), "never"
    joined_qkv: bool  # q, k and v are views of one projection, which v keeps alive
    result_copied: bool  # attention's result lies by head and is copied for the output projection
    lora_dropout: bool  # adapters drop out a part of their input: a mask and a copy for each
    adapter_bytes: int  # of an adapter's weight and input; 0: as the model computes
    plain_loss: int  # bytes a logit of cross-entropy over all logits, at its largest moment
    kernel_loss: int  # the same where one kernel computes it on 16-bit logits, its gradient in their place
    whole_logits: bool  # tensor parallel gathers the logits on each process
    root_stays: str  # what FSDP leaves gathered: "all" outside the blocks, "head", or all "backward" alone
    flat_gradients: bool  # FSDP1's flat parameters: frozen weights next to trained ones get gradients too
    outputs_kept: bool  # FSDP1 frees gradients of block outputs after the backward pass of frozen weights
    compiled_loss: bool  # the loss is compiled: no fp32 copies of the logits
    scattered_kept: bool  # selective checkpointing keeps what reduce-scatters give
    kept_unsharded: float  # bytes a parameter that FSDP leaves gathered under tensor parallel: a defect
    kept_scores: bool  # of models whose attention no flash kernel of torch computes
    foreach: bool  # its AdamW is torch's foreach implementation, unless another is asked for
    family_code: bool  # each model family has specific code: ``data/block_families.csv``
    source: str
    activation_copies: int = 0  # tensors of the MLP's width beyond the activation's input and result


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, str], Implementation]:
    """Return the rows of ``data/implementations.csv`` by (engine, version)."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [_row(row) for row in csv.DictReader(file)]
    return {(row.engine, row.version): row for row in rows}


def _row(row: dict[str, str]) -> Implementation:
    return Implementation(
        engine=row["engine"],
        version=row["version"],
        norm_input=int(row["norm_input"]),
        norm_output=int(row["norm_output"]),
        norm_output_fp32=int(row["norm_output_fp32"]),
        expand_kv=row["expand_kv"],
        joined_qkv=row["joined_qkv"] == "1",
        result_copied=row["result_copied"] == "1",
        lora_dropout=row["lora_dropout"] == "1",
        adapter_bytes=int(row["adapter_bytes"]),
        plain_loss=int(row["plain_loss"]),
        kernel_loss=int(row["kernel_loss"]),
        whole_logits=row["whole_logits"] == "1",
        root_stays=row["root_stays"],
        flat_gradients=row["flat_gradients"] == "1",
        outputs_kept=row["outputs_kept"] == "1",
        compiled_loss=row["compiled_loss"] == "1",
        scattered_kept=row["scattered_kept"] == "1",
        kept_unsharded=float(row["kept_unsharded"]),
        kept_scores=row["kept_scores"] == "1",
        foreach=row["foreach"] == "1",
        family_code=row["family_code"] == "1",
        activation_copies=int(row["activation_copies"]),
        source=row["source"],
    )


@lru_cache(maxsize=1)
def families() -> dict[str, dict[str, str]]:
    """Read the rows of ``data/block_families.csv`` by family; blank cells have the engine's value."""
    with FAMILIES.open(newline="", encoding="utf-8") as file:
        return {row["family"]: row for row in csv.DictReader(file)}


@lru_cache(maxsize=256)
def _of(engine: str, version: str, family: str) -> Implementation:
    rows = table()
    row = rows.get((engine, version)) or rows[engine, ""]
    family_row = families().get(family) if row.family_code else None
    if family_row is None:
        return row
    return replace(
        row,
        norm_output=int(family_row["norm_output"] or row.norm_output),
        joined_qkv=family_row["joined_qkv"] == "1",
        result_copied=family_row["result_copied"] == "1",
        activation_copies=int(family_row["activation_copies"]),
        source=family_row["source"],
    )


def of(setup: Setup) -> Implementation:
    """Return the implementation that a setup runs: its engine's row, as its model's family changes it.

    Of the version that the setup names; of today's where the table has no row for that version.
    """
    return _of(setup.engine, setup.engine_version, setup.model.family)


def fuses_optimizer(setup: Setup) -> bool:
    """Return whether AdamW is one fused kernel or torch's foreach; set by the setup or the engine."""
    if setup.fused_optimizer is not None:
        return setup.fused_optimizer
    return not of(setup).foreach
