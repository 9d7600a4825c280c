"""Build the tables of docs/which-method.md with ``finetune plan`` and ``finetune estimate``."""

from __future__ import annotations

import json
import shlex

from typer.testing import CliRunner

from estimator.cli.app import app
from estimator.plan import GIB, Plan

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-70b")
GPUS = (
    (1, "T4"),
    (1, "RTX A4000"),
    (1, "RTX 4090"),
    (2, "RTX 4090"),
    (4, "RTX 4090"),
    (1, "L40S"),
    (1, "A100 SXM 80GB"),
    (1, "H200 SXM"),
    (8, "H100 SXM"),
)
METHODS = ("full", "lora", "dora", "qlora")
NOTHING_FITS = 1  # exit status of ``finetune plan``


def command(model: str, count: int, gpu: str) -> str:
    """Return the command behind one cell."""
    return f'finetune plan --model {model} --gpu "{gpu}" --gpus {count} --nodes 1'


def first_plan(model: str, count: int, gpu: str) -> Plan | None:
    """Return the command's first plan, or None if nothing fits."""
    words = [*shlex.split(command(model, count, gpu))[1:], "--json"]
    done = CliRunner().invoke(app, words, prog_name="finetune")
    if done.exit_code == NOTHING_FITS:
        return None
    assert done.exit_code == 0, done.stderr
    return Plan.from_json(json.dumps(json.loads(done.stdout)["plans"][0]))


def methods() -> str:
    """Build rows of models and columns of methods; a cell is the memory in GiB that one process needs."""
    lines = ["| Model | " + " | ".join(METHODS) + " |", "|---" * (1 + len(METHODS)) + "|"]
    for model in MODELS:
        cells = [f"{_estimate(model, method):.1f}" for method in METHODS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _estimate(model: str, method: str) -> float:
    """Return the GiB of ``finetune estimate``, whose default is micro batch 1."""
    arguments = ["estimate", "--model", model, "--method", method, "--activation-checkpointing", "--json"]
    done = CliRunner().invoke(app, arguments, prog_name="finetune")
    assert done.exit_code == 0, done.stderr
    return float(json.loads(done.stdout)["memory"]["needs_bytes"]) / GIB


def table() -> str:
    """Build rows of GPUs and columns of models; a cell has the method and the GiB that each GPU needs."""
    lines = ["| GPUs of one machine |" + "".join(f" {model} |" for model in MODELS)]
    lines.append("|---" * (1 + len(MODELS)) + "|")
    for count, gpu in GPUS:
        plans = [first_plan(model, count, gpu) for model in MODELS]
        (memory, *_) = (plan.prediction.memory.capacity_bytes or 0 for plan in plans if plan)
        cells = [
            f"{plan.method}, {plan.prediction.memory.needs_bytes / GIB:.1f}" if plan else "-"
            for plan in plans
        ]
        lines.append(f"| {count} x {gpu}, {memory / GIB:.1f} GiB | {' | '.join(cells)} |")
    return "\n".join(lines)
