"""Documentation of a finished model: README, settings, plan, predicted and measured figures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from estimator.formatting import format_bytes, format_clock
from estimator.models import ModelRef, ModelSource
from estimator.plan import MemoryEstimate, Plan
from estimator.vocabulary import IMAGE_TASK, TASKS
from launchers import engines
from launchers.dataset import mixture
from launchers.evaluation.result import EXACT_MATCH, EvaluationResult
from launchers.models import weights
from launchers.report.metrics import Summary
from launchers.report.peak import NAMES, MemoryPeak
from launchers.results import handover, hub_push
from launchers.run_config import RunConfig

Facts = list[tuple[str, str]]  # rows of (label, formatted value)


def cache_folder() -> Path:
    """Return the folder on this machine that caches models outside Hugging Face's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metaflow-finetune"


def slug(model: str) -> str:
    """Convert the name of a model or dataset to a folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", model.strip("/"))


def cache_name(model: ModelSource) -> str:
    """Return the name of a model's folder in the cache; with a version for generated models."""
    name = slug(model.name)
    return f"{name}-v{weights.GENERATED_VERSION}" if model.kind == "made" else name


def closing_facts(
    plan: Plan,
    summary: Summary,
    memory_peak: MemoryPeak | None,
    evaluation: EvaluationResult | None,
    exported: Sequence[tuple[str, str]] = (),
) -> Facts:
    """Return rows of predicted and measured figures, losses and scores.

    ``memory_peak``: of the largest process. ``exported``: rows about the exported step, for runs with
    evaluations (launchers.report.evaluations).
    """
    predicted = plan.prediction
    seconds = summary.step_seconds
    rows = [
        ("steps", f"{summary.steps}"),
        *exported,
        ("loss", f"{summary.first_loss:.4f} first, {summary.last_loss:.4f} last"),
        ("time per step", format_clock(seconds) if seconds >= 60 else f"{seconds:.2f} s"),
        _speed(plan, summary),
        _memory(predicted.memory, memory_peak),
    ]
    if evaluation is not None and evaluation.base is not None and evaluation.finetuned is not None:
        base_value, finetuned_value = evaluation.base.loss, evaluation.finetuned.loss
        metric = "held-out loss"
        if TASKS[evaluation.task].draws_answers:
            metric, base_value, finetuned_value = "held-out reward", -base_value, -finetuned_value
        rows.append((metric, f"{base_value:.4f} before, {finetuned_value:.4f} after"))
        if "accuracy" in evaluation.finetuned.metrics:
            scores = (evaluation.base, evaluation.finetuned)
            base_value, finetuned_value = (score.metrics["accuracy"] for score in scores)
            metric = "answers judged" if TASKS[evaluation.task].judged else "pairs ranked"
            rows.append((f"held-out {metric} right", f"{base_value:.1%} before, {finetuned_value:.1%} after"))
    if evaluation is not None and evaluation.exact_match is not None:
        rows.append((EXACT_MATCH, evaluation.exact_match.text()))
    if summary.mfu is not None:
        rows.append(("MFU", f"{summary.mfu:.1%}"))
    return rows


def _memory(estimate: MemoryEstimate, peak: MemoryPeak | None) -> tuple[str, str]:
    """Format predicted and measured peak memory. Both are of one counter: that of ``peak``, if measured."""
    predicted = estimate.counted(peak.counter if peak else "device")
    name = peak.name if peak else NAMES["resident"]
    measured = format_bytes(peak.size_bytes if peak else None)
    if predicted is None:
        return name, f"predicted unknown, measured {measured}"
    likely, upper = format_bytes(predicted.likely_bytes), format_bytes(predicted.upper_bytes)
    return name, f"predicted {likely} (up to {upper}), measured {measured}"


def _speed(plan: Plan, summary: Summary) -> tuple[str, str]:
    if TASKS[plan.task].images:  # no published measurements to predict the speed of image models from
        return "images/s", f"predicted unknown, measured {summary.samples_per_second:,.2f}"
    predicted = plan.prediction.tokens_per_second
    text = "unknown" if predicted is None else f"{predicted:,.0f}"
    return "tokens/s", f"predicted {text}, measured {summary.tokens_per_second:,.0f}"


def write_records(
    folder: Path, plan: Plan, settings: RunConfig, facts: Facts, *, model: ModelRef, command: str
) -> None:
    """Write settings.yaml and plan.json to ``folder``, and the README to its result (``engines.result_of``).

    ``model``: model that was fine-tuned. ``command``: command that repeats the run.
    """
    values = _with_absolute_paths(settings).model_dump(mode="json", exclude={"automatic_choices"})
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    (folder / "settings.yaml").write_text(text, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
    page = engines.result_of(folder) / handover.PAGE
    page.write_text(model_page(plan, settings, facts, model=model, command=command, usage=usage_in(page)))


def usage_in(page: Path) -> str:
    """Read the usage section of a README; empty if there is none."""
    _, heading, usage = (page.read_text() if page.is_file() else "").partition(handover.HEADING)
    return heading + usage


def hub_page(folder: Path, plan: Plan, settings: RunConfig, facts: Facts, *, model: ModelRef) -> str:
    """Build the README for the Hub repository; its code loads the model from the Hub."""
    usage = usage_in(engines.result_of(folder) / handover.PAGE)
    # Only quoted paths, which are in Python code; commands of converters need a folder
    usage = usage.replace('"this/folder"', f'"{settings.export.push}"')
    license_name = hub_push.license_of(model.hub_id)
    return model_page(plan, settings, facts, model=model, usage=usage, license_name=license_name)


def _with_absolute_paths(settings: RunConfig) -> RunConfig:
    """Return the settings with paths made absolute, so that they work from any folder."""

    def absolute(name: str | None) -> str | None:
        return str(Path(name).expanduser().resolve()) if name and Path(name).expanduser().exists() else name

    tasks = tuple(map(absolute, settings.harness.tasks))
    evaluation = settings.evaluation.model_copy(update={"dataset": absolute(settings.evaluation.dataset)})
    changes = {
        "model": absolute(settings.model),
        "dataset": absolute(settings.dataset),
        "mixture": {absolute(name): weight for name, weight in settings.mixture.items()},
        "evaluation": evaluation,
        "harness": settings.harness.model_copy(update={"tasks": tasks}),
    }
    return settings.model_copy(update=changes)


def model_page(
    plan: Plan,
    settings: RunConfig,
    facts: Facts,
    *,
    model: ModelRef,
    usage: str,
    command: str | None = None,
    license_name: str | None = None,
) -> str:
    """Build a model card (README.md) in Hugging Face's format.

    ``usage``: usage section (launchers.results.handover). ``command``: command that repeats the run with the
    settings.yaml next to the folder; None: omitted. ``license_name``: license of the base model, if known.
    """
    merged = settings.merges(plan.method)
    images = TASKS[settings.task].images
    model_library = "diffusers" if images else "transformers"
    library = model_library if images or merged or plan.method == "adapter-v2" else "peft"
    metadata: dict[str, object] = {"library_name": library, "tags": ["metaflow-finetune", plan.method]}
    if model.hub_id is not None:
        metadata["base_model"] = model.hub_id
        metadata["base_model_relation"] = "finetune" if merged else "adapter"
    if license_name is not None:
        metadata["license"] = license_name
    if settings.task != "reward":
        metadata["pipeline_tag"] = IMAGE_TASK if images else "text-generation"
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    repeat_section = (
        f"Repeat the run with `settings.yaml` next to this folder:\n\n    {command}\n\n" if command else ""
    )
    return (
        f"---\n{yaml.safe_dump(metadata)}---\n# {plan.model}, fine-tuned\n\n"
        f"Method {plan.method}, engine {plan.engine}, data {', '.join(mixture.names(settings))}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n"
        f"{repeat_section}{usage}"
    )
