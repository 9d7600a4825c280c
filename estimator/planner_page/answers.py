"""Plans for a form: memory bars, prices and commands, or the reason why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from estimator import hardware, models
from estimator.charts import appearance, ordered
from estimator.engines import images, support, vision
from estimator.errors import CannotFit, UserError
from estimator.job import DEFAULT_BATCH, Job, Target
from estimator.models import ModelSpec
from estimator.option_names import option_name
from estimator.plan import Plan
from estimator.planner_page import fields, pasted
from estimator.planning.goals import Goals
from estimator.planning.obstacles import explain
from estimator.planning.planner import plans
from estimator.planning.ranking import Ranking
from estimator.planning.report import render
from estimator.planning.rows import row_of
from estimator.planning.run_command import run_command
from estimator.suggestions import Suggestion, contradicting, format_suggestion
from estimator.vocabulary import automatic_methods

TOP = 5  # plans, as `finetune plan` shows
WIDTH = 88  # columns of a plan in full
ADDED = ("categories", "text", "run")  # fields added to the row of a plan
_OF_JOB = (
    *("global_batch_size", "lora_rank", "precision", "optimizer", "micro_batch_size"),
    *("activation_checkpointing", "packing", "method", "engine"),
    *("vision", "images_per_row", "image_size"),
)
_OF_TARGET = ("nodes", "gpus", "gpu", "capacity")
_OF_GOALS = ("tokens", "deadline_hours", "budget_usd", "prefer", "spot", "max_gpus")


def answer(form: Mapping[str, str]) -> dict[str, Any]:
    """Plan for a form (texts by the names of ``fields.FIELDS``), and return plain values.

    ``command``: the equivalent ``finetune plan``. ``plans``: one row per plan, with memory by category in
    bytes, and the command that runs it. Without a plan: ``problem``, ``advice`` and ``suggestions``, each
    with the fields to change. Never raises for the values of a form.
    """
    command = shlex.join(["finetune", "plan", *fields.command_options(form)])
    try:
        return {"command": command, **_planned(form)}
    except UserError as error:
        return {"command": command, **_error_values(error)}


def _planned(form: Mapping[str, str]) -> dict[str, Any]:
    values = fields.read(form)
    if "model" not in values and "config" not in values:
        raise UserError("No model is chosen.", "Choose one of the list, or paste a config.json.")
    name = fields.MY_MODEL if "config" in values else values["model"]
    model = pasted.model(values["config"]) if "config" in values else _table_model(name)
    model = images.trained_model(model, values.get("resolution"))
    vision.check_model(values.get("vision"), model)
    job = Job(
        model=model,
        task=images.task_for(model, values.get("task", "sft")),  # type: ignore[arg-type]
        seq_len=images.length_of(model, values.get("seq_len")),
        lora_targets=tuple(model.projections),
        methods=automatic_methods(low_rank="lora_rank" in values),
        batch_multiple=None if "global_batch_size" in values else 1,
        **{
            "method": "auto",
            "engine": "auto",
            "global_batch_size": DEFAULT_BATCH,
            "packing": False if "global_batch_size" in values else None,
            "compile": None,
            "liger": None,
            **_select(values, _OF_JOB),
        },
        **support.offload_fields(
            zero=values.get("zero_offload", "none"), fsdp=values.get("fsdp_offload", "none")
        ),
    )
    cluster = pasted.cluster(values["cluster"], values.get("gpu")) if "cluster" in values else None
    target = Target(kind="catalogue" if cluster is None else "kubernetes", **_select(values, _OF_TARGET))
    goals = Goals(
        clouds=values.get("cloud", ()),
        instance_types=values.get("instance_type", ()),
        cluster=cluster,
        **_select(values, _OF_GOALS),
    )
    try:
        ranking = plans(job, target, goals, TOP)
    except UserError as error:
        raise error if cluster is None else explain(error, job, target, cluster) from None
    priced = [plan.request.instance_type or "" for plan in ranking.plans if plan.prediction.price_source]
    return {
        "order": ranking.order,
        "plans": _plan_rows(ranking, job, name, goals),
        "rejected": [str(line) for line in ranking.rejected],
        "notes": [*(cluster.notes if cluster else ()), *filter(None, [hardware.old_prices(priced)])],
        "timed": ranking.best.prediction.tokens is not None,
    }


def _table_model(name: str) -> ModelSpec:
    try:
        return models.find(name)
    except UserError as error:
        suggestion = error.advice if error.advice.startswith("Did you mean") else ""
        raise UserError(
            error.problem, f"{suggestion} Choose one of the list, or paste its config.json.".strip()
        ) from None


def _select(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _plan_rows(ranking: Ranking, job: Job, name: str, goals: Goals) -> list[dict[str, Any]]:
    memories = [plan.prediction.memory for plan in ranking.plans]
    categories = ordered(part for memory in memories for part, _ in memory.categories)
    return [
        row_of(rank, plan)
        | {
            "categories": _categories(plan, categories),
            "text": render(plan, WIDTH, hints=True),
            "run": run_command(plan, job, name, goals.cluster),
        }
        for rank, plan in enumerate(ranking.plans, 1)
    ]


def _categories(plan: Plan, order: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the parts of a GPU's memory in drawing order, each with color and pattern."""
    sizes = dict(plan.prediction.memory.categories)
    bars = []
    for name in order:
        if sizes.get(name):
            color, pattern = appearance(name, order)
            bars.append({"name": name, "bytes": sizes[name], "color": color, "pattern": pattern})
    return bars


def _error_values(error: UserError) -> dict[str, Any]:
    values: dict[str, Any] = {"problem": error.problem, "advice": error.advice, "suggestions": []}
    if isinstance(error, CannotFit):
        values["suggestions"] = [
            {"words": format_suggestion(suggestion), "fields": changed}
            for suggestion in error.suggestions
            if (changed := _changed(suggestion)) is not None
        ]
    return values


def _changed(suggestion: Suggestion) -> dict[str, str] | None:
    """Return the texts of the fields that a suggestion changes; None if the form does not have one."""
    field_of_option = {field.option: field for field in fields.FIELDS}
    left_out = [field_of_option.get(option_name(setting)) for setting in contradicting(suggestion)]
    changed = {field.name: "" for field in left_out if field is not None}
    for setting, value in suggestion.items():
        field = field_of_option.get(option_name(setting))
        if field is None:
            return None
        if isinstance(value, bool):
            checked = "on" if value else ""
            changed[field.name] = checked or ("off" if field.choices == fields.BOOLEAN_TEXTS else "")
        else:
            changed[field.name] = "" if value is None else str(value)
    return changed
