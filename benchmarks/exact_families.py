"""Formulas of memory against traces of the real code, for every model family that exact mode builds.

    python -m benchmarks.exact_families                 # half an hour on 2 cores, no GPU
    python -m benchmarks.exact_families --family lfm2 --size small   # replaces these rows
    python -m benchmarks.documents                      # then renews exact_families.md

Traces a step of a small model and of the smallest published model of each family, with full training and
LoRA, as the DeepSpeed engine runs it (ZeRO stage 2 on 8 processes). Writes results/exact_families.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import describe
from estimator import memory, models
from estimator.errors import UserError
from estimator.exact.support import untraceable
from estimator.models import ModelSpec, hf_config
from estimator.setup import Setup
from tests.launchers.engines.loop.families import FAMILIES

RESULTS = Path(__file__).parent / "results" / "exact_families.json"
GOALS = {"states": 0.02, "activations": 0.05}
STATES = ("weights", "adapters", "master weights", "gradients", "optimizer")
METHODS: tuple[Literal["full", "lora"], ...] = ("full", "lora")
SIZES = ("small", "published")
PROCESSES = 8
SEQ_LEN, SEQUENCES = 256, 4  # short, as the gated delta rule is traced in chunks of 64 tokens
# The test models have two or three blocks of widths 8 to 96, in which what is saved once would dominate
SCALE, REPEATS = 8, 4
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "head_dim",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_head_dim",
    "mamba_d_head",
    "n_embd",
    "d_model",
    "rotary_dim",
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Errors of the formulas for one step: formula / trace - 1."""

    family: str
    model: str
    size: str  # small or published
    method: str
    states: float | None = None
    activations: float | None = None  # live at the loss
    refused: str = ""  # reason why the step is not traced
    seconds: float = 0.0


def small_config(family: str, scale: int = SCALE, repeats: int = REPEATS) -> dict[str, Any]:
    """Return the fields of :func:`small_model` that differ from the test suite's model."""
    config = FAMILIES[family]
    scaled = {name: config[name] * scale for name in WIDTHS if isinstance(config.get(name), int)}
    layers = {name: config[name] * repeats for name in LAYERS if name in config}
    # Without masks of a window, as the engines' attention to windows has none on GPUs
    layers |= {name: 2 * SEQ_LEN for name in ("sliding_window", "attention_chunk_size") if name in config}
    scaled |= layers | {name: kinds * repeats for name, kinds in config.items() if isinstance(kinds, list)}
    return scaled | {"vocab_size": 8192}


def small_model(family: str, scale: int = SCALE, repeats: int = REPEATS) -> ModelSpec:
    """Return the test suite's model of a family, at ``scale`` times its widths and ``repeats`` its blocks."""
    from transformers import AutoConfig

    fields = FAMILIES[family] | small_config(family, scale, repeats)
    values = AutoConfig.for_model(family, **fields).to_dict()
    return hf_config.to_spec(values | {"model_type": family}, f"small {family}")


def published_model(family: str) -> ModelSpec | None:
    """Return the smallest model of a family in the model table."""
    specs = [models.find(name) for name in models.names()]
    return min((spec for spec in specs if spec.family == family), key=lambda s: s.parameters, default=None)


def compare(
    model: ModelSpec, size: str, method: Literal["full", "lora"], seq_len: int = SEQ_LEN
) -> Comparison:
    """Trace a step of a model and compare the formulas with it; ``size`` labels the result."""
    from estimator.exact.trace import trace

    setup = Setup(
        model=model,
        engine="deepspeed",
        method=method,
        precision="bf16-mixed",
        loss="recomputed",
        sharding="zero2",
        shard=PROCESSES,
        seq_len=seq_len,
        micro_batch_size=SEQUENCES,
        lora_targets=model.all_linear,
    )
    case = Comparison(family=model.family, model=model.name, size=size, method=method)
    if reason := untraceable(setup):
        return replace(case, refused=reason)
    try:
        traced = trace(setup)
    except UserError as error:
        return replace(case, refused=error.problem)
    states, formula = traced["states"], memory.states(setup)
    return replace(
        case,
        states=_total(formula) / _total(states) - 1,
        activations=memory.saved_bytes(setup) / traced["moments"]["loss"]["activations"] - 1,
        seconds=round(traced["seconds"], 1),
    )


def _total(states: dict[str, int]) -> int:
    return sum(states.get(name, 0) for name in STATES)


def read() -> list[Comparison]:
    """Read the committed comparisons."""
    return [Comparison(**row) for row in json.loads(RESULTS.read_text())["comparisons"]]


def outside(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparisons that miss a goal."""
    return [row for row in rows if any(abs(getattr(row, name) or 0) > goal for name, goal in GOALS.items())]


def table() -> str:
    """Format the committed comparisons: a row per family, a column per size and method."""
    rows = read()
    heads = [f"{size}, {method}" for size in SIZES for method in METHODS]
    lines = [f"| Family | Published model | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for family in dict.fromkeys(row.family for row in rows):
        cells = {(row.size, row.method): row for row in rows if row.family == family}
        names = [row.model for key, row in cells.items() if key[0] == "published"]
        shown = [_cell(cells.get((size, method))) for size in SIZES for method in METHODS]
        lines.append(f"| `{family}` | {names[0] if names else ''} | {' | '.join(shown)} |")
    return "\n".join(lines)


def missed() -> str:
    """Summarize the committed comparisons: families outside the goals, and those that were not traced."""
    rows = read()
    families = {row.family for row in rows}
    outside_goals = dict.fromkeys(f"`{row.family}`" for row in outside(rows))
    summary = f"Of {len(families)} families, outside the goals: {', '.join(outside_goals) or 'none'}."
    refusals = dict.fromkeys(f"- {row.family}: {row.refused}" for row in rows if row.refused)
    return "\n".join([summary, *([""] if refusals else []), *refusals])


def _cell(row: Comparison | None) -> str:
    if row is None:
        return ""
    if row.states is None or row.activations is None:
        return "not traced"
    return f"{row.states:+.1%}, {row.activations:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="all by default")
    parser.add_argument("--size", action="append", choices=SIZES, help="both by default")
    options = parser.parse_args()
    families, sizes = options.family or list(FAMILIES), options.size or SIZES
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = {(row.family, row.size, row.method): row for row in (read() if RESULTS.is_file() else [])}
    for family in families:
        for size in sizes:
            model = small_model(family) if size == "small" else published_model(family)
            if model is None:
                continue
            for method in METHODS:
                row = rows[family, size, method] = compare(model, size, method)
                print(family, size, method, row.refused or _cell(row), f"{row.seconds} s", flush=True)
                ordered = [asdict(rows[key]) for key in sorted(rows)]
                values = {"machine": describe(), "comparisons": ordered}
                RESULTS.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
