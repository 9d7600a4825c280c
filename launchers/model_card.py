"""What goes with a finished model: its page, settings and plan, and predicted beside measured."""

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
from launchers import engines, handover, hub_push
from launchers.dataset import mixture
from launchers.evaluate import EXACT_MATCH, EvaluationResult
from launchers.models import weights
from launchers.report.metrics import Summary
from launchers.report.peak import NAMES, MemoryPeak
from launchers.run_config import RunConfig

Facts = list[tuple[str, str]]  # rows of (what, value), for people


def cache_folder() -> Path:
    """Where this machine keeps models that did not come from Hugging Face's own cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metaflow-finetune"


def slug(model: str) -> str:
    """A model's name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", model.strip("/"))


def cache_name(model: ModelSource) -> str:
    """Name of a model's folder in the cache. It has a version if the model is generated here."""
    name = slug(model.name)
    return f"{name}-v{weights.GENERATED_VERSION}" if model.kind == "made" else name


def closing_facts(
    plan: Plan,
    summary: Summary,
    memory_peak: MemoryPeak | None,
    evaluation: EvaluationResult | None,
    exported: Sequence[tuple[str, str]] = (),
) -> Facts:
    """Predicted beside measured, and what was learnt. ``memory_peak``: of the largest process.

    ``exported``: which step the result is, where that is a question (launchers.report.evaluations).
    """
    predicted = plan.prediction
    seconds = summary.step_seconds
    rows = [
        ("steps", f"{summary.steps}"),
        *exported,
        ("loss", f"{summary.first_loss:.4f} first, {summary.last_loss:.4f} last"),
        ("time for a step", format_clock(seconds) if seconds >= 60 else f"{seconds:.2f} s"),
        _speed(plan, summary),
        _memory(predicted.memory, memory_peak),
    ]
    if evaluation is not None and evaluation.base is not None and evaluation.finetuned is not None:
        before, after = evaluation.base.loss, evaluation.finetuned.loss
        what = "held-out loss"
        if TASKS[evaluation.task].draws_answers:
            what, before, after = "held-out reward", -before, -after
        rows.append((what, f"{before:.4f} before, {after:.4f} after"))
        if "accuracy" in evaluation.finetuned.metrics:
            before, after = evaluation.base.metrics["accuracy"], evaluation.finetuned.metrics["accuracy"]
            what = "answers told" if TASKS[evaluation.task].judged else "pairs ranked"
            rows.append((f"held-out {what} right", f"{before:.1%} before, {after:.1%} after"))
    if evaluation is not None and evaluation.exact_match is not None:
        rows.append((EXACT_MATCH, evaluation.exact_match.text()))
    if summary.mfu is not None:
        rows.append(("MFU", f"{summary.mfu:.1%}"))
    return rows


def _memory(estimate: MemoryEstimate, peak: MemoryPeak | None) -> tuple[str, str]:
    """What was predicted for the counter that has measured it; without one, for the whole process."""
    predicted = estimate.counted(peak.counter if peak else "device")
    name = peak.name if peak else NAMES["resident"]
    measured = format_bytes(peak.size_bytes if peak else None)
    if predicted is None:
        return name, f"predicted unknown, measured {measured}"
    likely, upper = format_bytes(predicted.likely_bytes), format_bytes(predicted.upper_bytes)
    return name, f"predicted {likely} (up to {upper}), measured {measured}"


def _speed(plan: Plan, summary: Summary) -> tuple[str, str]:
    if TASKS[plan.task].images:  # no speed of such models was published that one could be predicted by
        return "images/s", f"predicted unknown, measured {summary.samples_per_second:,.2f}"
    predicted = _number(plan.prediction.tokens_per_second)
    return "tokens/s", f"predicted {predicted}, measured {summary.tokens_per_second:,.0f}"


def write_records(
    folder: Path, plan: Plan, settings: RunConfig, facts: Facts, *, model: ModelRef, again: str
) -> None:
    """Beside what was trained: settings.yaml and plan.json; in it (``engines.result_of``), its page.

    ``model``: what was fine-tuned. ``again``: the command that repeats the run.
    """
    values = _from_anywhere(settings).model_dump(mode="json")
    (folder / "settings.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "plan.json").write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
    page = engines.result_of(folder) / handover.PAGE
    page.write_text(model_page(plan, settings, facts, model=model, again=again, usage=usage_in(page)))


def usage_in(page: Path) -> str:
    """How to ask the model, of a page that has it."""
    _, heading, usage = (page.read_text() if page.is_file() else "").partition(handover.HEADING)
    return heading + usage


def hub_page(folder: Path, plan: Plan, settings: RunConfig, facts: Facts, *, model: ModelRef) -> str:
    """The page for the repository that ``folder``'s result is pushed to, by whose name it is loaded."""
    usage = usage_in(engines.result_of(folder) / handover.PAGE)
    usage = usage.replace('"this/folder"', f'"{settings.export.push}"')  # converters take folders alone
    license_name = hub_push.license_of(model.hub_id)
    return model_page(plan, settings, facts, model=model, usage=usage, license_name=license_name)


def _from_anywhere(settings: RunConfig) -> RunConfig:
    """The settings with the whole paths of local files, so that they repeat the run from any folder."""

    def whole(name: str | None) -> str | None:
        return str(Path(name).expanduser().resolve()) if name and Path(name).expanduser().exists() else name

    evaluation = settings.evaluation.model_copy(update={"dataset": whole(settings.evaluation.dataset)})
    changes = {
        "model": whole(settings.model),
        "dataset": whole(settings.dataset),
        "mixture": {whole(name): weight for name, weight in settings.mixture.items()},
        "evaluation": evaluation,
        "harness": settings.harness.model_copy(update={"tasks": tuple(map(whole, settings.harness.tasks))}),
    }
    return settings.model_copy(update=changes)


def model_page(
    plan: Plan,
    settings: RunConfig,
    facts: Facts,
    *,
    model: ModelRef,
    usage: str,
    again: str | None = None,
    license_name: str | None = None,
) -> str:
    """A model card (README.md) in Hugging Face's form.

    ``usage``: how to ask the model (handover). ``again``: the command that repeats the run with the
    settings.yaml beside the folder. ``license_name``: of the base, by its own card.
    """
    whole = settings.merges(plan.method)
    library = "transformers" if whole or plan.method == "adapter-v2" else "peft"
    images = TASKS[settings.task].images
    library = "diffusers" if images else library
    head: dict[str, object] = {"library_name": library, "tags": ["metaflow-finetune", plan.method]}
    if model.hub_id is not None:
        head["base_model"] = model.hub_id
        head["base_model_relation"] = "finetune" if whole else "adapter"
    if license_name is not None:
        head["license"] = license_name
    if settings.task != "reward":
        head["pipeline_tag"] = IMAGE_TASK if images else "text-generation"
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts)
    repeating = f"`settings.yaml` beside this folder repeats the run:\n\n    {again}\n\n" if again else ""
    return (
        f"---\n{yaml.safe_dump(head)}---\n# {plan.model}, fine-tuned\n\n"
        f"Method {plan.method}, engine {plan.engine}, data {', '.join(mixture.names(settings))}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n"
        f"{repeating}{usage}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
