"""What goes with a finished model: its page, settings and plan, and predicted beside measured."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml

from estimator.models import ModelRef
from estimator.plan import GIB, Plan
from launchers import engines
from launchers.dataset import mixture
from launchers.evaluate import EvaluationResult
from launchers.report.metrics import Summary, duration
from launchers.settings import Settings

Facts = list[tuple[str, str]]  # rows of (what, value), for people


def cache_folder() -> Path:
    """Where this machine keeps models that did not come from Hugging Face's own cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metaflow-finetune"


def slug(model: str) -> str:
    """A model's name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", model.strip("/"))


def closing_facts(
    plan: Plan, summary: Summary, memory_peak_bytes: int | None, evaluation: EvaluationResult | None
) -> Facts:
    """Predicted beside measured, and what was learnt. ``memory_peak_bytes``: of the largest process."""
    predicted = plan.prediction
    memory = predicted.memory
    rows = [
        ("steps", f"{summary.steps}"),
        ("loss", f"{summary.first_loss:.4f} first, {summary.last_loss:.4f} last"),
        (
            "time for a step",
            duration(summary.step_seconds) if summary.step_seconds >= 60 else f"{summary.step_seconds:.2f} s",
        ),
        (
            "tokens/s",
            f"predicted {_number(predicted.tokens_per_second)}, measured {summary.tokens_per_second:,.0f}",
        ),
        (
            "peak memory of a process",
            f"predicted {memory.shows_bytes / GIB:.2f} GiB (up to {memory.shows_range[1] / GIB:.2f}), "
            f"measured {_gib(memory_peak_bytes)}",
        ),
    ]
    if evaluation is not None and evaluation.base is not None and evaluation.finetuned is not None:
        before, after = evaluation.base.loss, evaluation.finetuned.loss
        what = "held-out loss"
        if evaluation.task == "grpo":
            what, before, after = "held-out reward", -before, -after
        rows.append((what, f"{before:.4f} before, {after:.4f} after"))
        if "accuracy" in evaluation.finetuned.metrics:
            before, after = evaluation.base.metrics["accuracy"], evaluation.finetuned.metrics["accuracy"]
            what = "answers told" if evaluation.task == "kto" else "pairs ranked"
            rows.append((f"held-out {what} right", f"{before:.1%} before, {after:.1%} after"))
    if summary.mfu is not None:
        rows.append(("MFU", f"{summary.mfu:.1%}"))
    return rows


def write_records(
    folder: Path, plan: Plan, settings: Settings, facts: Facts, *, model: ModelRef, again: str
) -> None:
    """Beside what was trained: settings.yaml and plan.json; in it (``engines.result_of``), its page.

    ``model``: what was fine-tuned. ``again``: the command that repeats the run.
    """
    values = settings.model_dump(mode="json")
    (folder / "settings.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "plan.json").write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
    page = model_page(plan, settings, facts, model=model, again=again)
    (engines.result_of(folder) / "README.md").write_text(page)


def model_page(plan: Plan, settings: Settings, facts: Facts, *, model: ModelRef, again: str) -> str:
    """A model card (README.md) in Hugging Face's form."""
    whole = settings.merges(plan.method)
    loading = "" if whole else _how_to_load(plan.method, model)
    library = "transformers" if whole or plan.method == "adapter-v2" else "peft"
    head: dict[str, object] = {"library_name": library, "tags": ["metaflow-finetune", plan.method]}
    if model.hub_id is not None:
        head["base_model"] = model.hub_id
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    return (
        f"---\n{yaml.safe_dump(head)}---\n# {plan.model}, fine-tuned\n\n"
        f"Method {plan.method}, engine {plan.engine}, data {', '.join(mixture.names(settings))}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n{loading}"
        "`settings.yaml` beside this folder repeats the run:\n\n"
        f"    {again}\n"
    )


def _how_to_load(method: str, model: ModelRef) -> str:
    """For a page: how an adapter that isn't merged comes onto its base."""
    base = model.location or model.name
    if method == "adapter-v2":
        lines = [
            "from launchers.engines.loop import adapter_v2  # of metaflow-finetune",
            "",
            f'model = adapter_v2.load("{base}", "this/folder")',
        ]
    else:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}")',
            'model = PeftModel.from_pretrained(base, "this/folder")',
        ]
    code = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"The adapter is not merged into its base; this puts it onto it:\n\n{code}\n\n"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.2f} GiB"
