"""What rejection sampling adds to a launch: a scorer that works, how much is generated, what that costs."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from decorators.backends.overrides import request_for
from estimator import models
from estimator.errors import Change, UserError
from estimator.plan import Plan
from launchers import pipeline
from launchers.dataset import sources
from launchers.scoring.check import check_function
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRejection:
    """What is known of generation and scoring before the run begins."""

    settings: Settings
    trained: Settings  # the same, with the steps that the answers kept are enough for
    prompts: int | None  # None: not known before the dataset is fetched

    def text(self, plan: Plan) -> str:
        """For a terminal: what is generated at most, where, and what of its time and price is known."""
        rejection = self.settings.rejection
        each = rejection.answers * rejection.max_new_tokens
        drawn = f"{rejection.answers} answers of at most {rejection.max_new_tokens:,} tokens"
        if self.prompts is None:
            amount = f"prompts: unknown until {self.settings.dataset} is fetched; {drawn} to each of them"
        else:
            amount = (
                f"{self.prompts:,} prompts x {drawn}: at most {self.prompts * each:,} tokens are generated, "
                f"{self.prompts * rejection.answers:,} answers are scored"
            )
        request = request_for(plan, "evaluate")
        gpus = f"{request.gpus_per_node}x {request.gpu}" if request.gpus_per_node else "no GPU"
        machine = f" ({request.instance_type})" if request.instance_type else ""
        lines = [
            "Rejection sampling, before training:",
            f"  amount   {amount}",
            f"  steps    generate, score and compare, each on one node with {gpus}{machine}",
            f"  score    {self.settings.rejection.score}",
            f"  time     unknown: the speed of generation is not predicted{_per_hour(plan)}",
            f"  price    {_price(plan)}",
        ]
        return "\n".join(lines)


def check(settings: Settings) -> PlannedRejection:
    """What is known of these settings' generation and scoring.

    Raises UserError where there is no scorer, where a function has no number for a sample, where a reward
    model's folder holds another model, or where there is too little data.
    """
    score = settings.rejection.score
    if score is None:
        raise UserError(
            "Nothing says how answers are scored.",
            "Give a function of your own (--score path.py:function, called with prompt and answer), or a "
            "reward model (--score FOLDER, what task reward exports).",
        )
    if settings.task != "sft":
        raise UserError(
            (
                Change("task", settings.task),
                ": this flow trains on the answers that it keeps, with task sft.",
            ),
            ("Leave ", Change("task"), " out, or use flows/finetune_flow.py."),
        )
    scorer = scorer_of(score)
    if scorer.function is not None:
        check_function(score)
    else:
        source = models.locate(score)
        if source.kind == "folder":
            check_reward_model(Path(source.location), "rejection.score", score)
    prompts = _count_prompts(settings)
    if prompts is None:
        return PlannedRejection(settings=settings, trained=settings, prompts=None)
    kept = math.ceil(prompts * settings.rejection.top_share)
    held_out = 0
    if settings.evaluation.fraction and settings.evaluation.dataset is None and kept > 1:
        held_out = min(max(1, round(settings.evaluation.fraction * kept)), 256, kept - 1)
    if kept - held_out < settings.global_batch_size:
        raise UserError(
            f"global_batch_size {settings.global_batch_size} is more than the {kept - held_out:,} answers "
            f"that can be kept to train on, of {prompts:,} prompts.",
            ("Give ", Change("global_batch_size", max(1, kept - held_out)), " or less, or more prompts."),
        )
    steps = (kept - held_out) * settings.epochs // settings.global_batch_size
    trained = settings.model_copy(update={"max_steps": min(steps, settings.max_steps or steps)})
    return PlannedRejection(settings=settings, trained=trained, prompts=prompts)


def _count_prompts(settings: Settings) -> int | None:
    """How many prompts there will be; None where the dataset has to be fetched from elsewhere first."""
    kind = sources.kind_of(settings.dataset)
    if kind not in ("built-in", "path"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        count = len(pipeline.read_samples(settings, sources.fetch(settings.dataset, Path(folder))))
    return min(count, settings.rejection.prompts or count)


def _per_hour(plan: Plan) -> str:
    """What an hour of those steps costs, where it is known."""
    usd = _usd_per_hour(plan)
    return "" if usd is None else f"; an hour of a step's machine costs {usd:,.2f} USD"


def _usd_per_hour(plan: Plan) -> float | None:
    """Of one node of the training's kind, where the steps before training ask for the same machine."""
    whole = plan.prediction.usd_per_hour
    same = request_for(plan, "evaluate").instance_type == plan.request.instance_type is not None
    return whole / plan.request.nodes if whole is not None and same else None


def _price(plan: Plan) -> str:
    if plan.target == "local":
        return "none on this machine"
    training = plan.prediction.usd
    known = "unknown" if training is None else f"{training:,.2f} USD"
    return f"of the whole run: training {known} (at most, see the plan), generation and scoring unknown"
