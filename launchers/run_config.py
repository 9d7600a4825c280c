"""Configuration of a planned run: settings with every default and ``auto`` resolved."""

from __future__ import annotations

from pydantic import Field

from estimator.engines import automatic
from estimator.models import DiffusionSpec, ModelSpec
from estimator.plan import Plan
from estimator.vocabulary import LAUNCHED_METHODS, METHODS, TASKS, LaunchedEngine, LaunchedMethod
from launchers.dataset import sources, support_tickets
from launchers.images import runs
from launchers.models import weights
from launchers.settings import Settings
from launchers.settings.sections import NonNegative, Optimizer, Positive, PositiveFloat

# tiny-llama starts from random weights and needs far larger learning rates than a pretrained model. For
# LLaMA-Adapters, whose gates start at 0, litgpt@26857050's finetune_adapter and finetune_adapter_v2 use AdamW
# with torch's default of 1e-3 and a batch of 16, the default here.
_LOW_RANK: tuple[str, ...] = tuple(name for name in LAUNCHED_METHODS if METHODS[name].low_rank)
_LLAMA_ADAPTERS: tuple[str, ...] = tuple(name for name in LAUNCHED_METHODS if METHODS[name].llama_adapter)
_TINY_LLAMA_ADAPTER_RATES = {"adapter-v1": 1e-1, "adapter-v2": 2e-2}
_LEARNING_RATES = {"full": 2e-5, **dict.fromkeys(_LOW_RANK, 2e-4), **dict.fromkeys(_LLAMA_ADAPTERS, 1e-3)}
_TINY_LEARNING_RATES = {"full": 7e-4, **dict.fromkeys(_LOW_RANK, 5e-3), **_TINY_LLAMA_ADAPTER_RATES}
# Defaults of TRL 1.16 for DPO, CPO and ORPO; ten times as much for adapters, as its documentation recommends
_PREFERENCE_RATES = {"full": 1e-6, **dict.fromkeys((*_LOW_RANK, *_LLAMA_ADAPTERS), 1e-5)}
# Default of TRL 1.16's RewardConfig for adapters; a tenth of it for full fine-tuning
_REWARD_RATES = {"full": 1e-5, **dict.fromkeys(_LOW_RANK, 1e-4)}
# Full fine-tuning: TRL 1.16's GRPOConfig, and Shao et al. 2024 (arXiv:2402.03300), section 4.2
_GRPO_RATES = {"full": 1e-6, **dict.fromkeys(_LOW_RANK, 1e-5)}
_TINY_PREFERENCE_RATES = {"full": 5e-4, **dict.fromkeys(_LOW_RANK, 2e-3), **_TINY_LLAMA_ADAPTER_RATES}


# A packed sequence holds many short rows, so a small packed dataset has few optimizer steps. Our choice.
MIN_PACKED_STEPS = 100


class RunOptimizer(Optimizer):
    """Optimizer settings whose learning rate is resolved (never ``auto``)."""

    lr: PositiveFloat


class RunConfig(Settings):
    """Settings of a planned run, used by data, engines, evaluation and reports together with the plan.

    Values that the planner chooses (precision, activation checkpointing, micro batch size, sharding,
    hardware) are read only from the plan; the fields of these names contain the user's input.
    """

    method: LaunchedMethod
    engine: LaunchedEngine
    seq_len: Positive
    """Maximum sequence length in tokens. For images: latent positions of one image of
    ``images.resolution``."""
    optimizer: RunOptimizer
    global_batch_size: Positive
    packing: bool
    min_packed_steps: NonNegative = Field(default=0, exclude=True)
    """Minimum optimizer steps of a packed run; with fewer, rows are not packed. 0: always pack.

    Not written to the settings file of a run.
    """
    liger: bool
    compile: bool
    automatic_choices: tuple[automatic.Choice, ...] = ()
    """Settings among packing, liger and compile that the user left ``auto``. Not in a run's settings file."""

    def with_checkpoint_interval(self, total_steps: int, plan: Plan | None = None) -> RunConfig:
        """Resolve ``checkpoint_every`` for a run of ``total_steps``, unless the user has set it.

        ``plan``: on spot nodes its interval is used, which minimizes the time lost by interruptions.
        """
        if self.checkpoint_every:
            return self
        interruptions = plan.prediction.interruptions if plan is not None else None
        planned = interruptions.steps if interruptions is not None else None
        return self.model_copy(update={"checkpoint_every": planned or max(10, round(total_steps / 10))})


def apply_defaults(settings: Settings, spec: ModelSpec) -> Settings:
    """Fill in defaults that depend on the type of model and the dataset: task, resolution, held-out data.

    Raises UserError for a resolution or a sequence length that the type of model does not support.
    """
    if isinstance(spec, DiffusionSpec):
        settings = runs.apply_defaults(settings, spec)
    return evaluate_on_test_split(settings)


def evaluate_on_test_split(settings: Settings) -> Settings:
    """Set the test split as held-out data of runs on support-tickets; for task sft, answer all its rows.

    Other datasets, and values set by the user, are not changed.
    """
    evaluation = settings.evaluation
    if settings.dataset != sources.TICKETS or settings.mixture:
        return settings
    changes: dict[str, object] = {}
    if evaluation.dataset is None and "fraction" not in evaluation.model_fields_set:
        changes["dataset"] = f"{sources.TICKETS}#test"
    if evaluation.generations == "auto" and settings.task == "sft":
        changes["generations"] = support_tickets.ROWS["test"]
    return settings.model_copy(update={"evaluation": evaluation.model_copy(update=changes)})


def resolve(
    settings: Settings,
    spec: ModelSpec,
    *,
    method: str,
    engine: str,
    batch: int | None = None,
    plan: Plan | None = None,
) -> RunConfig:
    """Resolve every default of ``settings`` for this model.

    ``method``, ``engine`` and ``batch`` (global batch size) are those of the plan. ``plan`` decides packing,
    Liger and torch.compile where they are ``auto``; None: they are off. ``checkpoint_every`` may stay 0; see
    :meth:`RunConfig.with_checkpoint_interval`, which needs the number of steps.
    """
    settings = apply_defaults(settings, spec)
    optimizer = settings.optimizer.model_dump()
    if settings.optimizer.lr == "auto":
        optimizer["lr"] = _default_rates(settings, spec)[method]
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    values |= {
        "method": method,
        "engine": engine,
        "seq_len": settings.sequence_length(spec),
        "optimizer": optimizer,
        "global_batch_size": batch or settings.batch_size,
    }
    values["automatic_choices"] = tuple(name for name in automatic.CHOICES if values[name] == "auto")
    for name in automatic.CHOICES:
        if values[name] == "auto":
            values[name] = plan is not None and getattr(plan, name)
            if name == "packing" and values[name]:
                values["min_packed_steps"] = MIN_PACKED_STEPS
    return RunConfig.model_validate(values)


def _default_rates(settings: Settings, spec: ModelSpec) -> dict[str, float]:
    """Return the default learning rates by method."""
    tiny = spec.name == weights.TINY
    task = TASKS[settings.task]
    if task.images:
        return runs.rates(spec)
    if task.preferences:
        rates = _REWARD_RATES if settings.task == "reward" else _PREFERENCE_RATES
        return _TINY_PREFERENCE_RATES if tiny else rates
    if task.draws_answers:
        return _TINY_PREFERENCE_RATES if tiny else _GRPO_RATES
    return _TINY_LEARNING_RATES if tiny else _LEARNING_RATES
