"""Settings that have no effect, because another setting rules them out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from estimator.errors import UserError
from estimator.option_names import option_arguments, option_name
from estimator.vocabulary import ENGINES, METHODS, TASKS
from launchers.settings.description import default_of, dotted_names
from launchers.settings.fields import Settings

OFF: tuple[object, ...] = ("auto", "none", None, False, 0, (), {})  # values that request nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Settings that apply only if another setting, ``cause``, has a certain value.

    ``settings``: dotted names, or sections with all their settings. ``advice``: alternative to removing one.
    """

    settings: tuple[str, ...]
    cause: str
    applies: Callable[[Settings, str], bool]  # called with the settings and the dotted name
    advice: str = ""

    def covers(self, name: str) -> bool:
        """Return whether the rule is about the setting ``name``."""
        return name in self.settings or name.partition(".")[0] in self.settings

    def subject(self, settings: Settings) -> str:
        """Return the value of ``cause`` as on the command line."""
        value = _value(settings, self.cause)
        return f"task {value}" if self.cause == "task" else " ".join(option_arguments(self.cause, value))


def _has_method(settings: Settings, name: str) -> bool:
    if settings.method == "auto":
        return True
    method = METHODS[settings.method]
    if name.startswith("adapter."):
        return method.llama_adapter
    return method.low_rank and (method.quantized or name != "lora.quantization")


def _has_task(settings: Settings, name: str) -> bool:
    task = TASKS[settings.task]
    section, _, last = name.rpartition(".")
    if section == "preference":
        return last in task.preference_settings
    if section == "evaluation":
        # A reward model writes no answers
        return settings.task != "reward" or settings.evaluation.generations == 0
    return {"rl": task.draws_answers, "images": task.images, "": task.next_token}[section]


def _has_engine(settings: Settings, name: str) -> bool:
    if settings.engine == "auto":
        return True
    return ENGINES[settings.engine].sharding_options == name.partition(".")[0]


RULES = (
    Rule(
        settings=("preference", "rl", "images", "neftune_alpha", "evaluation.generations"),
        cause="task",
        applies=_has_task,
    ),
    Rule(settings=("train_on_prompt",), cause="task", applies=lambda settings, _: settings.task == "sft"),
    Rule(
        settings=("lora", "adapter"),
        cause="method",
        applies=_has_method,
        advice="choose the method it belongs to",
    ),
    Rule(settings=("zero",), cause="engine", applies=_has_engine, advice="use --engine deepspeed"),
    Rule(settings=("fsdp",), cause="engine", applies=_has_engine, advice="use --engine fsdp2"),
    Rule(
        settings=("fsdp",),
        cause="zero.offload",
        applies=lambda settings, _: settings.zero.offload == "none",
    ),
    Rule(
        settings=("recompute",),
        cause="activation_checkpointing",
        applies=lambda settings, _: settings.activation_checkpointing is not False,
    ),
    Rule(
        settings=("optimizer.betas", "optimizer.eps"),
        cause="optimizer.name",
        applies=lambda settings, _: settings.optimizer.name not in ("sgd", "adafactor"),
    ),
    Rule(
        settings=("schedule.min_lr_ratio",),
        cause="schedule.name",
        applies=lambda settings, _: settings.schedule.name != "constant",
    ),
    Rule(
        settings=("schedule.decay_ratio",),
        cause="schedule.name",
        applies=lambda settings, _: settings.schedule.name == "wsd",
    ),
    Rule(
        settings=("evaluation.fraction",),
        cause="evaluation.dataset",
        applies=lambda settings, _: settings.evaluation.dataset is None,
    ),
)
NEEDS = {
    "harness": ("harness.tasks", "TASK"),
    "export.visibility": ("export.push", "USER/MODEL"),
    "profile.ranks": ("profile.steps", "FIRST:LAST"),
    "resources.interruption_rate": ("resources.spot", ""),
}
"""Settings, or sections, that have an effect only with another setting, and the form of its value."""


def check_used(settings: Settings, overrides: Collection[str] = (), *, model_resolved: bool = True) -> None:
    """Raise UserError for the first setting that has no effect.

    A setting counts if it differs from its default, or is among ``overrides`` (``name=value``) with a value
    that requests something: a finished run's settings file has all defaults. ``model_resolved``: False before
    the type of the model has decided the default task.
    """
    task_known = model_resolved or settings.task != default_of("task")
    typed = {override.partition("=")[0].strip() for override in overrides}
    for name in _requested(settings, typed):
        for rule in RULES:
            if rule.cause == "task" and not task_known:
                continue
            if rule.covers(name) and not rule.applies(settings, name):
                remedy = f"Remove it, or {rule.advice}." if rule.advice else "Remove it."
                raise UserError(f"{option_name(name)} does not apply to {rule.subject(settings)}.", remedy)
        needed, form = NEEDS.get(name) or NEEDS.get(name.partition(".")[0], (name, ""))
        if name != needed and _value(settings, needed) in OFF:
            option = option_name(needed)
            raise UserError(
                f"{option_name(name)} has no effect without {option}.",
                f"Add {option} {form}".rstrip() + ", or remove it.",
            )


def _requested(settings: Settings, typed: Collection[str]) -> Iterator[str]:
    for name in dotted_names():
        value = _value(settings, name)
        if value != default_of(name) or (name in typed and value not in OFF):
            yield name


def _value(settings: Settings, name: str) -> object:
    value: object = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value
