"""Compare our estimator with others on the same published measurements of memory.

    python -m benchmarks.estimators    # seconds; writes benchmarks/results/estimators.*

Accelerate's and DeepSpeed's own functions are called; EleutherAI's and nanotron's formulas are reimplemented
from their publications, as their tools are scripts with other inputs. Each is scored over the rows that it
claims to support, and over all rows, ignoring inputs that it does not know (a LoRA rank, a preference loss).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.published import rows, scoring
from benchmarks.published.scoring import Scored, percentile, score
from estimator.models import ModelSpec
from estimator.plan import GIB
from estimator.setup import Setup

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another estimator: its bytes of one GPU for a setup, and the setups that it supports."""

    name: str
    source: str
    claim: str
    claims: Callable[[Setup], bool]
    bytes_of: Callable[[Setup], float]


# ---------------------------------------------------------------------------------------------------------
# Accelerate and DeepSpeed, by their own functions


def accelerate_bytes(setup: Setup) -> float:
    """Compute `accelerate estimate-memory`, "Training using Adam"; without the model's output head."""
    from accelerate.commands.estimate import estimate_training_usage

    model = setup.model
    head = 0 if model.tied_embeddings else model.vocab * model.hidden
    dtype = "float32" if setup.precision == "fp32" else "float16"
    return float(max(estimate_training_usage(4 * (model.parameters - head), dtype).values()))


def deepspeed_bytes(setup: Setup) -> float:
    """Compute estimate_zero2/3_model_states_mem_needs; FSDP counts as its ZeRO equivalent."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    cluster = {
        "num_gpus_per_node": min(setup.processes_per_node, setup.world_size),
        "num_nodes": setup.nodes,
        "cpu_offload": setup.offload != "none",
    }
    total = setup.model.parameters
    if _stage(setup) == 3:
        # the module with the most direct parameters, as in its "all_live" variant: the embedding
        largest = max(_largest_matrix(setup.model), setup.model.vocab * setup.model.hidden)
        needs = estimate_zero3_model_states_mem_needs(
            total, largest, cpu_offload_params=setup.offload == "all", **cluster
        )
    else:
        needs = estimate_zero2_model_states_mem_needs(total, **cluster)
    return float(needs[1])


def _stage(setup: Setup) -> int:
    return 3 if setup.sharding in ("fsdp", "zero3") else 2


def _largest_matrix(model: ModelSpec) -> int:
    return max(rows * columns for rows, columns in model.linear_shapes.values())


# ---------------------------------------------------------------------------------------------------------
# Formulas, derived from what their authors publish


def cookbook_bytes(setup: Setup) -> float:
    """Compute EleutherAI cookbook's calc_transformer_mem.py @827ee3b at its defaults.

    Its parameters: untied embeddings, learned positions, query and key/value projections, MLPs of as many
    matrices as the model has. States: 2 + 4 + 12 bytes, by stage over all GPUs. Activations: 34 bytes a token
    and hidden value with checkpointing, 5 a s / h more without. Buffers: 5e8 values, and 1e9 with stage 3.
    """
    model, gpus = setup.model, setup.world_size
    hidden, layers, seq = model.hidden, model.layers, setup.seq_len
    matrices = 3 if model.gated_mlp else 2
    experts = max(model.experts, 1) / setup.expert
    mlp = matrices * layers * hidden * model.ffn * experts
    attention = 2 * (1 + model.kv_heads / model.heads) * layers * hidden**2
    embeddings = 2 * model.vocab * hidden + hidden * seq
    total = embeddings + 8 * hidden * layers + 2 * hidden + attention + mlp
    stage = {"none": 0, "ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "shard_grad_op": 2}.get(
        setup.sharding, 3
    )
    weights = 2 * total / (setup.tensor * setup.pipeline) / (gpus if stage == 3 else 1)
    gradients = 4 * total / (gpus if stage >= 2 else 1)
    optimizer = 12 * total / (gpus if stage >= 1 else 1)
    buffers = 2 * 5e8 * (stage >= 1 and gpus > 1) + 2 * 1e9 * (stage == 3 and gpus > 1)
    scores = 0.0 if setup.checkpointing != "none" else 5 * model.heads * seq / hidden
    activations = seq * setup.micro_batch_size * hidden * layers * (34 + scores)
    return weights + gradients + optimizer + buffers + activations


def nanotron_bytes(setup: Setup) -> float:
    """Compute the Ultra-Scale Playbook's formulas, the base of nanotron's predict_memory.

    Parameters and gradients in bf16, fp32 master weights and two fp32 moments, by ZeRO stage over the data
    parallel group; activations of 34 bytes a token, hidden value and layer with flash attention (its charts:
    Llama 8B at 1,024 tokens 4.25 GiB), 2 with full recomputation; over tensor (with sequence parallelism) and
    context parallel. Korthikanti et al. 2022 (arXiv:2205.05198) for 34.
    """
    model = setup.model
    parameters = model.parameters / (setup.tensor * setup.pipeline)
    shards = setup.shard
    stage = {"none": 0, "ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "shard_grad_op": 2}.get(
        setup.sharding, 3
    )
    weights = 2 * parameters / (shards if stage == 3 else 1)
    gradients = 2 * parameters / (shards if stage >= 2 else 1)
    optimizer = 12 * parameters / (shards if stage >= 1 else 1)
    bytes_per_value = 2 if setup.checkpointing == "full" else 34
    layers = model.layers / setup.pipeline
    in_flight = min(setup.accumulation, setup.pipeline)  # micro batches in flight on the first stage
    activations = bytes_per_value * setup.tokens * model.hidden * layers * in_flight / setup.tensor
    return weights + gradients + optimizer + activations


def llama_factory_bytes(setup: Setup) -> float:
    """Compute LLaMA-Factory's table (README @ff6d4d12e): GB per billion parameters over the GPUs."""
    if setup.quantization.startswith("nf4"):
        share = 0.5
    elif setup.quantization == "int8":
        share = 1.0
    elif setup.adapters:
        share = 2.0
    else:
        share = 8.0 if setup.precision == "bf16" else 18.0
    return share * setup.model.parameters / (setup.shard * setup.tensor * setup.pipeline)


def _full(setup: Setup) -> bool:
    return not setup.adapters and setup.optimizer == "adamw" and setup.offload == "none"


RIVALS = (
    Rival(
        name="accelerate estimate-memory",
        source="accelerate, commands/estimate.py: estimate_training_usage",
        claim="all weights trained with Adam, one GPU",
        claims=lambda setup: _full(setup) and setup.world_size == 1,
        bytes_of=accelerate_bytes,
    ),
    Rival(
        name="DeepSpeed estimate_zero2/3",
        source="deepspeed, runtime/zero: estimate_zero2/3_model_states_mem_needs",
        claim="all weights trained with Adam, states sharded as by stage 2 or 3",
        claims=lambda setup: (
            not setup.adapters
            and setup.optimizer == "adamw"
            and setup.tensor * setup.pipeline == 1
            and setup.sharding in ("zero2", "zero3", "fsdp", "shard_grad_op")
        ),
        bytes_of=deepspeed_bytes,
    ),
    Rival(
        name="EleutherAI cookbook",
        source="EleutherAI/cookbook@827ee3b, calc/calc_transformer_mem.py, formula",
        claim="all weights trained with Adam in mixed precision, ZeRO, tensor and pipeline parallel",
        claims=lambda setup: _full(setup) and setup.precision != "fp32" and setup.context == 1,
        bytes_of=cookbook_bytes,
    ),
    Rival(
        name="nanotron predict_memory",
        source="nanotron/ultrascale-playbook, formulas",
        claim="all weights trained with Adam in mixed precision, any parallelism",
        claims=lambda setup: _full(setup) and setup.precision == "bf16-mixed",
        bytes_of=nanotron_bytes,
    ),
    Rival(
        name="LLaMA-Factory's table",
        source="hiyouga/LLaMA-Factory@ff6d4d12e, README",
        claim="all weights, LoRA or QLoRA on one GPU",
        claims=lambda setup: setup.world_size == 1,
        bytes_of=llama_factory_bytes,
    ),
)


# ---------------------------------------------------------------------------------------------------------
# Scores


def figures(items: list[Scored]) -> dict[str, Any]:
    """Return a group's score, the share within 10 %, and how often the upper bound covers the need."""
    group_score = score(items)
    errors = sorted(abs(item.error) for item in items)
    within = sum(error <= 0.1 for error in errors) / len(errors) if errors else None
    return {
        "rows": group_score.rows,
        "median_abs_error": group_score.median_abs_error,
        "p95_abs_error": percentile(errors, 0.95),
        "bias": group_score.bias,
        "within_10pct": within,
        "upper_covers": score_of_bounds(items),
    }


def score_of_bounds(items: list[Scored]) -> float | None:
    """Return the share of rows whose need is at most the upper bound."""
    bounds = [item.upper >= item.measured for item in items if item.upper is not None]
    return sum(bounds) / len(bounds) if bounds else None


def predict_with(rival: Rival, ours: list[Scored]) -> list[Scored]:
    """Predict the same rows with a rival, whose estimate also serves as its upper bound."""
    answers = []
    for item in ours:
        assert item.row.setup is not None
        gib = rival.bytes_of(item.row.setup) / GIB
        answers.append(
            Scored(
                row=item.row, measured=item.measured, predicted=gib, lower=None, upper=gib, basis=rival.source
            )
        )
    return answers


def measure(quality: str) -> list[dict[str, Any]]:
    """Score each estimator on the setups it supports, and ours on the same rows and on all."""
    ours = [item for item in scoring.compare(rows.TABLE).memory if item.row.quality in quality]
    everything = figures(ours)
    entries = [{"name": "finetune", "claim": "every row", "claimed": everything, "all": everything}]
    for rival in RIVALS:
        answers = predict_with(rival, ours)
        claimed, same = (
            [item for item in group if item.row.setup and rival.claims(item.row.setup)]
            for group in (answers, ours)
        )
        entries.append(
            {
                "name": rival.name,
                "source": rival.source,
                "claim": rival.claim,
                "claimed": figures(claimed),
                "finetune_on_claimed": figures(same),
                "all": figures(answers),
            }
        )
    return entries


HEAD = (
    "| estimator | rows | median error | 95th percentile | bias | within 10 % | covers |\n" + "|---" * 7 + "|"
)


def markdown(command: str, machine: dict[str, Any], entries: list[dict[str, Any]], quality: str) -> str:
    lines = [
        "# Memory estimators on the same published measurements",
        "",
        f"`{command}`, {machine['text']}",
        "",
        f"Rows of quality {' and '.join(quality)} of `benchmarks/published/data/measured.csv`. "
        "Error: predicted / measured - 1; bias: median of the signed errors; "
        "covers: share of rows whose need is at most the figure given "
        "(ours: the upper bound; the others give one figure).",
        "",
        "## Over all rows",
        "",
        HEAD,
        *(_line(entry["name"], entry["all"]) for entry in entries),
        "",
        "## Over the rows that each claims",
    ]
    for entry in entries[1:]:
        lines += ["", f"{entry['name']}: {entry['claim']}.", "", HEAD]
        lines += [_line(entry["name"], entry["claimed"]), _line("finetune", entry["finetune_on_claimed"])]
    return "\n".join(lines) + "\n"


def _line(name: str, scores: dict[str, Any]) -> str:
    shown = [
        "-" if scores[key] is None else f"{scores[key]:{form}}"
        for key, form in (
            ("median_abs_error", ".1%"),
            ("p95_abs_error", ".1%"),
            ("bias", "+.1%"),
            ("within_10pct", ".0%"),
            ("upper_covers", ".0%"),
        )
    ]
    return f"| {name} | {scores['rows']} | {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quality", default="AB", help="qualities of rows, one letter each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.estimators", *sys.argv[1:]])
    machine, entries = describe(), measure(options.quality)
    options.out.mkdir(parents=True, exist_ok=True)
    results = {"command": command, "machine": machine, "quality": options.quality, "estimators": entries}
    (options.out / "estimators.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(command, machine, entries, options.quality)
    (options.out / "estimators.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
