"""Measurements as rows in the columns of benchmarks/published/data/measured.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.on_gpu.cases import Case
from benchmarks.on_gpu.session import Measured
from benchmarks.published import rows as published
from estimator import models
from estimator.engines.setups import dense_mask, variable_length
from estimator.plan import GIB, Layout, Plan
from launchers.settings import Settings

DIGITS = 4  # decimal places of GiB


def columns() -> list[str]:
    """Return the column names of the shipped table, in order."""
    with published.TABLE.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def rows(measured: Sequence[Measured], *, source: str, prefix: str) -> list[dict[str, Any]]:
    """Build one row per figure of each run that ended, and one row per run that ran out of memory.

    ``source`` names the machine and the day; ids are ``prefix`` and a number.
    """
    table: list[dict[str, Any]] = []
    for each in measured:
        outcome = each.outcome
        if outcome is None or outcome.plan is None or outcome.ended not in ("ran", "out of memory"):
            continue
        common = _of_run(each, Plan.from_json(outcome.plan)) | {"source": source}
        first = f"{prefix}-{len(table) + 1:03d}"
        figures = _figures(each) if each.ran else [{"oom": 1}]
        for number, figure in enumerate(figures):
            notes = [common["notes"], figure.pop("notes", "")]
            if number:
                notes.append(f"same run as {first}")
            row = {**common, **figure, "id": f"{prefix}-{len(table) + 1:03d}"}
            table.append({**row, "notes": "; ".join(filter(None, notes))})
    return table


def _figures(measured: Measured) -> list[dict[str, Any]]:
    """Return the cells of each memory figure; the first one also has the speed."""
    outcome, search = measured.outcome, measured.found
    assert outcome is not None
    if outcome.reserved_bytes is None:
        peaks = [("process (resident)", outcome.resident_bytes, "")]
    else:
        peaks = [
            ("reserved (max_memory_reserved)", outcome.reserved_bytes, ""),
            ("allocated (max_memory_allocated)", outcome.live_bytes, ""),
            ("process (NVML, beyond what was in use before)", measured.device_bytes, ""),
        ]
    if search is not None and measured.needed_bytes is not None:
        above = (search.runs_bytes - search.fails_bytes) / GIB
        how = f"smallest limit that ran, {above:.2f} GiB above one that did not"
        if not search.trials:
            how = f"as it ran without a limit, {above:.2f} GiB above what was alive; none lower was tried"
        peaks.append(("needed", measured.needed_bytes, how))
    cells = [
        {
            "peak_mem": _gib(size),
            "unit": "GiB",
            "mem_kind": kind,
            "peak_mem_GiB": _gib(size),
            "gib_min": _gib(size),
            "gib_max": _gib(size),
            "notes": notes,
        }
        for kind, size, notes in peaks
        if size is not None
    ]
    if cells and measured.tokens_per_second is not None:
        cells[0]["tps_per_gpu"] = round(measured.tokens_per_second, 1)
    return cells


def _of_run(measured: Measured, plan: Plan) -> dict[str, Any]:
    case, layout, outcome = measured.case, plan.layout, measured.outcome
    assert outcome is not None
    spec, lora, targets = models.find(case.model), Settings().lora, models.PROJECTIONS
    adapters = case.method != "full"
    capacity = outcome.device_total_bytes or plan.prediction.memory.capacity_bytes
    return {
        "locator": case.name,
        "model": spec.name,
        "n_params": spec.parameters,
        "hidden": spec.hidden,
        "layers": spec.layers,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "ffn": spec.ffn,
        "vocab": spec.vocab,
        "tied": int(spec.tied_embeddings),
        "method": case.method,
        "lora_rank": lora.rank if adapters else "",
        "lora_targets": " ".join(targets) if adapters else "",
        "trainable_params": spec.lora_parameters(lora.rank, targets) if adapters else spec.parameters,
        "framework": _framework(case.engine),
        "gpu": outcome.device_name or ("CPU" if layout.device == "cpu" else plan.request.gpu_type),
        "gpu_mem_GB": _gib(capacity) if capacity else "",
        "n_gpus": case.processes,
        "nodes": 1,
        **_sharding(layout),
        "micro_batch": layout.micro_batch_size,
        "grad_accum": layout.accumulation,
        "seq_len": layout.seq_len,
        "packing": _packing(measured, layout),
        **_types(layout),
        "quant": _quantization(case.engine) if case.method == "qlora" else "",
        "optimizer": {"adamw": "AdamW", "sgd": "SGD"}[layout.optimizer],
        "opt_in_bwd": 0,
        "act_ckpt": "full" if layout.activation_checkpointing else "none",
        "compile": 0,
        "cpu_offload": 0,
        "loss_impl": "CE chunked (8 chunks)" if case.engine == "torchtune" else "CE recomputed",
        "attn": "sdpa",
        "quality": "A",
        "notes": "; ".join(_notes(case, layout)),
    }


def _quantization(engine: str) -> str:
    """Name the implementation of NF4: torchao's tensors, or launchers/engines/loop/quantized.py."""
    return "nf4 (torchao, double)" if engine == "torchtune" else "nf4 (own layers, double, bf16 storage)"


def _framework(engine: str) -> str:
    """Return the engine with its package's version; for FSDP2, torch's."""
    return f"fsdp2 torch {version('torch')}" if engine == "fsdp2" else f"{engine} {version(engine)}"


def _notes(case: Case, layout: Layout) -> Iterator[str]:
    if layout.sharding == "shard_grad_op":
        yield "reshard_after_forward=False"
    if case.expandable_segments and layout.device == "cuda":
        yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _sharding(layout: Layout) -> dict[str, Any]:
    if layout.sharding.startswith("zero"):
        return {"zero_stage": int(layout.sharding[-1])}
    return {"fsdp_shard": layout.world_size} if layout.sharding in ("fsdp", "shard_grad_op") else {}


def _packing(measured: Measured, layout: Layout) -> str:
    """Describe packing and lengths in the terms that benchmarks/published parses."""
    case = measured.case
    step = (case.engine, layout.device, models.find(case.model), "sft", case.method, layout.precision)
    separated = "separated by cumulative lengths" if variable_length(*step) else ""
    if case.lengths == "fixed":
        separated = separated or ("dense document mask" if dense_mask(*step) else "")
        return ", ".join(filter(None, ["packed", separated]))
    first = ", longest rows first" if case.longest_first else ""
    separated = separated or "padded to the micro batch's longest"
    return f"variable length (short samples), {separated}{first}"


def _types(layout: Layout) -> dict[str, Any]:
    """Return the dtypes of stored parameters and of computation."""
    kept = {"bf16": "bf16", "bf16-mixed": "fp32 master weights", "fp32": "fp32"}
    return {
        "param_dtype": kept[layout.precision],
        "compute_dtype": "fp32" if layout.precision == "fp32" else "bf16",
    }


def _gib(size: int) -> float:
    return round(size / GIB, DIGITS)


def as_csv(table: Sequence[dict[str, Any]]) -> str:
    """Format the rows as CSV, like the shipped table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
