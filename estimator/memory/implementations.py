"""Table of the tensors that each engine's model code keeps for the backward pass.

To add an engine or to correct one, edit a row of ``data/implementations.csv``. The numbers were counted with
``torch.autograd.graph.saved_tensors_hooks`` on one real block of the code that ``source`` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows, parse_row
from estimator.setup import Setup

TABLE = Path(__file__).parent.parent / "data" / "implementations.csv"
FAMILIES = TABLE.with_name("block_families.csv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """Tensors that one version of an engine saves. Bytes are per element, with 16-bit compute."""

    engine: str
    version: str = ""  # current
    norm_input: int  # saved input of RMSNorm: 4: an fp32 copy, 2: the 16-bit input itself
    norm_output: int  # saved result of RMSNorm before the weight, for a trained weight only
    norm_output_fp32: int  # ``norm_output`` with fp32 compute
    expand_kv: str  # keys and values repeated for all query heads: "always", "padded" (with a mask), "never"
    joined_qkv: bool  # q, k and v are views of one projection, which v keeps alive
    result_copied: bool  # attention's result is ordered by head and copied for the output projection
    lora_dropout: bool  # dropout on adapter inputs: saves a mask and a copy for each
    adapter_bytes: int  # of an adapter's weight and input; 0: those of the compute type
    plain_loss: int  # peak bytes per logit of cross-entropy over all logits
    kernel_loss: int  # peak bytes per logit with one in-place kernel on 16-bit logits
    whole_logits: bool  # tensor parallel gathers the logits on each process
    root_stays: str  # parameters that FSDP keeps gathered: "all" outside blocks, "head", all in "backward"
    flat_gradients: bool  # FSDP1's flat parameters: frozen weights next to trained ones also have gradients
    outputs_kept: bool  # FSDP1 frees gradients of block outputs after the backward pass of frozen weights
    compiled_loss: bool  # the loss is compiled: no fp32 copies of the logits
    scattered_kept: bool  # selective checkpointing saves the results of reduce-scatters
    kept_unsharded: float  # bytes per parameter that FSDP keeps gathered with tensor parallelism: a defect
    kept_scores: bool  # attention scores are saved for models that torch's flash kernels do not support
    foreach: bool  # AdamW is torch's foreach implementation by default
    family_code: bool  # each model family has specific code: ``data/block_families.csv``
    source: str
    activation_copies: int = 0  # tensors of the MLP's width beyond the activation's input and result


@lru_cache(maxsize=1)
def table() -> dict[tuple[str, str], Implementation]:
    """Return the rows of ``data/implementations.csv`` by (engine, version)."""
    rows = [Implementation(**parse_row(Implementation, row)) for row in load_rows(TABLE)]
    return {(row.engine, row.version): row for row in rows}


@lru_cache(maxsize=1)
def families() -> dict[str, dict[str, str]]:
    """Read the rows of ``data/block_families.csv`` by family; blank cells have the engine's value."""
    return {row["family"]: row for row in load_rows(FAMILIES)}


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
    """Return the row of a setup's engine, with the values of the model's family.

    Uses the version that the setup names, or the current one if the table has no row for it.
    """
    return _of(setup.engine, setup.engine_version, setup.model.family)


def fuses_optimizer(setup: Setup) -> bool:
    """Return whether AdamW is one fused kernel, by the setup or else by the engine; otherwise foreach."""
    if setup.fused_optimizer is not None:
        return setup.fused_optimizer
    return not of(setup).foreach
