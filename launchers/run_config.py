"""The configuration of a planned run: settings in which every default and ``auto`` is decided."""

from __future__ import annotations

from estimator.models import DiffusionSpec, ModelSpec
from estimator.plan import Plan
from estimator.vocabulary import LAUNCHED_METHODS, METHODS, TASKS, LaunchedEngine, LaunchedMethod
from launchers import image_runs
from launchers.dataset import sources, support_tickets
from launchers.models import weights
from launchers.sections import Evaluation, Optimizer, Positive, PositiveFloat
from launchers.settings import Settings

# tiny-llama starts from random weights, so it wants far larger steps than a trained model. LLaMA-Adapters'
# gates begin at 0: litgpt@26857050's finetune_adapter and finetune_adapter_v2 leave AdamW at torch's 1e-3,
# with the batch of 16 that is the default here.
_LOW_RANK: tuple[str, ...] = tuple(name for name in LAUNCHED_METHODS if METHODS[name].low_rank)
_LLAMA_ADAPTERS: tuple[str, ...] = tuple(name for name in LAUNCHED_METHODS if METHODS[name].llama_adapter)
_TINY_LLAMA_ADAPTER_RATES = {"adapter-v1": 1e-1, "adapter-v2": 2e-2}
_LEARNING_RATES = {"full": 2e-5, **dict.fromkeys(_LOW_RANK, 2e-4), **dict.fromkeys(_LLAMA_ADAPTERS, 1e-3)}
_TINY_LEARNING_RATES = {"full": 7e-4, **dict.fromkeys(_LOW_RANK, 5e-3), **_TINY_LLAMA_ADAPTER_RATES}
# TRL 1.16's for DPO, CPO and ORPO; with adapters ten times as much, as its documentation advises.
_PREFERENCE_RATES = {"full": 1e-6, **dict.fromkeys((*_LOW_RANK, *_LLAMA_ADAPTERS), 1e-5)}
# TRL 1.16's RewardConfig, for adapters; for all weights a tenth of it
_REWARD_RATES = {"full": 1e-5, **dict.fromkeys(_LOW_RANK, 1e-4)}
# TRL 1.16's GRPOConfig, and Shao et al. 2024 (arXiv:2402.03300), section 4.2, for all weights
_GRPO_RATES = {"full": 1e-6, **dict.fromkeys(_LOW_RANK, 1e-5)}
_TINY_PREFERENCE_RATES = {"full": 5e-4, **dict.fromkeys(_LOW_RANK, 2e-3), **_TINY_LLAMA_ADAPTER_RATES}


class RunOptimizer(Optimizer):
    """The optimizer with its learning rate decided."""

    lr: PositiveFloat


class RunConfig(Settings):
    """Settings of a planned run. Data, engines, evaluation and reports read this and the plan.

    What the plan chooses (precision, activation checkpointing, micro batch size, sharding, hardware) is read
    from the plan alone: the same fields here keep what the user asked for.
    """

    method: LaunchedMethod
    engine: LaunchedEngine
    seq_len: Positive
    """Longest sequence in tokens. Of images: positions of the latents of one of ``images.resolution``."""
    optimizer: RunOptimizer
    global_batch_size: Positive

    def with_checkpoint_interval(self, total_steps: int, plan: Plan | None = None) -> RunConfig:
        """Decide ``checkpoint_every`` for a run of ``total_steps``, unless the user has.

        ``plan``: on spot nodes its interval is the one that loses least by interruptions.
        """
        if self.checkpoint_every:
            return self
        interruptions = plan.prediction.interruptions if plan is not None else None
        planned = interruptions.steps if interruptions is not None else None
        return self.model_copy(update={"checkpoint_every": planned or max(10, round(total_steps / 10))})


def apply_defaults(settings: Settings, spec: ModelSpec) -> Settings:
    """Fill in what depends on the kind of model and the dataset: task, resolution, held-out data.

    Raises UserError for a resolution or a sequence length that the kind of model does not have.
    """
    if isinstance(spec, DiffusionSpec):
        settings = image_runs.apply_defaults(settings, spec)
    return evaluate_on_test_split(settings)


def evaluate_on_test_split(settings: Settings) -> Settings:
    """Evaluate a run on support-tickets by that dataset's test split; in task sft answer all its rows.

    Settings of other datasets, and values that the user has chosen, stay as they are.
    """
    evaluation = settings.evaluation
    if settings.dataset != sources.TICKETS or settings.mixture:
        return settings
    changes: dict[str, object] = {}
    if evaluation.dataset is None and evaluation.fraction == Evaluation().fraction:
        changes["dataset"] = f"{sources.TICKETS}#test"
    if evaluation.generations == "auto" and settings.task == "sft":
        changes["generations"] = support_tickets.ROWS["test"]
    return settings.model_copy(update={"evaluation": evaluation.model_copy(update=changes)})


def resolve(
    settings: Settings, spec: ModelSpec, *, method: str, engine: str, batch: int | None = None
) -> RunConfig:
    """Decide every default of ``settings`` for this model, with the plan's method, engine and global batch.

    ``checkpoint_every`` may stay 0 until the number of steps is known
    (:meth:`RunConfig.with_checkpoint_interval`).
    """
    settings = apply_defaults(settings, spec)
    optimizer = settings.optimizer.model_dump()
    if settings.optimizer.lr == "auto":
        optimizer["lr"] = _learning_rates(settings, spec)[method]
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    values |= {
        "method": method,
        "engine": engine,
        "seq_len": settings.sequence_length(spec),
        "optimizer": optimizer,
        "global_batch_size": batch or settings.batch_size,
    }
    return RunConfig.model_validate(values)


def _learning_rates(settings: Settings, spec: ModelSpec) -> dict[str, float]:
    """Learning rates by method, where none is given."""
    tiny = spec.name == weights.TINY
    task = TASKS[settings.task]
    if task.images:
        return image_runs.rates(spec)
    if task.preferences:
        usual = _REWARD_RATES if settings.task == "reward" else _PREFERENCE_RATES
        return _TINY_PREFERENCE_RATES if tiny else usual
    if task.draws_answers:
        return _TINY_PREFERENCE_RATES if tiny else _GRPO_RATES
    return _TINY_LEARNING_RATES if tiny else _LEARNING_RATES
