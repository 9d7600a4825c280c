"""Launch of rejection sampling: check of the scorer, amount of generation, its price."""

from __future__ import annotations

import itertools
import math
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from decorators.backends.overrides import request_for
from estimator import models
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_duration, format_usd
from estimator.inference import generation
from estimator.inference.generation import Range, Sampling
from estimator.models import ModelSpec
from estimator.plan import Generation, Plan, Stage
from launchers import run_config
from launchers.dataset import sources
from launchers.dataset.rows import Conversation
from launchers.rejection.generation import check_vllm
from launchers.run import preparation
from launchers.scoring.check import check_function
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings

WIDTH = 100  # columns, as the plan's own text has
# Tokens that a chat template may add to the turns' texts: a default system prompt, and the role of each turn
TEMPLATE_TOKENS, TURN_TOKENS = 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRejection:
    """Generation and scoring as known before the run starts."""

    settings: Settings
    trained: Settings  # the same, with the number of steps for the selected answers
    prompts: int | None  # None: unknown until the dataset is downloaded
    held_out: int | None  # number of prompts for the comparison with the finished model
    longest: int | None  # upper bound of the longest prompt's tokens

    def planned(self, run: preparation.PlannedRun) -> Plan:
        """Return the run's plan with the stages of generation, scoring and comparison added.

        Raises UserError if several nodes are requested on this machine, or if vLLM is requested and cannot
        generate the answers.
        """
        plan, sampling = run.plan, self._sampling(run)
        self._check_generator(run)
        if sampling.nodes and sampling.nodes > 1 and plan.target == "local" and plan.request.gpus_per_node:
            raise UserError(
                f"--rejection-nodes {sampling.nodes}: on this machine one process uses all GPUs.",
                "Leave --rejection-nodes out, or run on a cluster.",
            )
        return replace(plan, generation=generation.plan_generation(plan, run.model.spec, sampling))

    def _check_generator(self, run: preparation.PlannedRun) -> None:
        if self.settings.rejection.generator != "vllm":
            return
        if not run.settings.merges(run.plan.method):
            raise UserError(
                (
                    f"--rejection-generator vllm samples from whole models, and --method {run.plan.method} "
                    "trains an adapter."
                ),
                "Leave --rejection-generator out.",
            )
        if run.plan.target == "local":
            check_vllm(self.settings.rejection.generator_python)

    def _sampling(self, run: preparation.PlannedRun) -> Sampling:
        rejection, model = self.settings.rejection, run.model.spec
        max_prompt_tokens = max(1, model.max_seq_len - rejection.max_new_tokens)
        by_function = scorer_of(rejection.score or "").function is not None
        return Sampling(
            prompts=self.prompts,
            held_out=self.held_out,
            answers=rejection.answers,
            prompt_tokens=min(self.longest or run.settings.seq_len, max_prompt_tokens),
            new_tokens=rejection.max_new_tokens,
            top_p=rejection.top_p,
            reward_model=None if by_function else _reward_model(rejection.score or ""),
            by_function=by_function,
            nodes=rejection.nodes,
            heads_shared=rejection.generator == "vllm",
        )

    def text(self, plan: Plan) -> str:
        """Format for a terminal: maximum number of answers; hardware, time and cost of each stage."""
        planned = plan.generation
        if planned is None:
            raise ValueError("a plan of another run: it has no generation")
        training = plan.prediction
        trained = Stage(
            name="compare",  # not shown; the stage only carries time and price
            request=plan.request,
            hours=None if training.hours is None else (training.hours, training.hours),
            usd=None if training.usd is None else (training.usd, training.usd),
        )
        rows = [
            ("amount", self._amount()),
            ("batch", _batch(plan, planned)),
            *(
                (stage.name, f"{_placement(plan, stage)}: {_stage_figures(plan, stage)}")
                for stage in planned.stages
            ),
            ("train", f"as above: {_stage_figures(plan, trained)}"),
            ("total", _total(plan)),
            (
                "basis",
                f"all answers of maximum length, prompts of {planned.prompt_tokens:,} tokens; "
                f"{planned.stages[0].basis}",
            ),
        ]
        return "\n".join(["Rejection sampling:", *(_row(name, text) for name, text in rows)])

    def _amount(self) -> str:
        rejection = self.settings.rejection
        each = rejection.answers * rejection.max_new_tokens
        drawn = f"{rejection.answers} answers of at most {rejection.max_new_tokens:,} tokens"
        if self.prompts is None:
            return f"prompts: unknown until {self.settings.dataset} is fetched; {drawn} to each of them"
        return (
            f"{self.prompts:,} prompts x {drawn}: at most {self.prompts * each:,} tokens are generated, "
            f"{self.prompts * rejection.answers:,} answers are scored"
        )


def check(settings: Settings) -> PlannedRejection:
    """Check the settings of generation and scoring.

    Raises UserError if there is no scorer, a function returns no number for a sample, a reward model's folder
    contains another model, or there is too little data.
    """
    score = settings.rejection.score
    if score is None:
        raise UserError(
            "No scorer of the answers is set.",
            "Give a function (--score path.py:function, called with prompt and answer), or a "
            "reward model (--score FOLDER, as exported by task reward).",
        )
    if settings.task != "sft":
        raise UserError(
            f"--task {settings.task}: this flow trains on the answers that it keeps, with task sft.",
            "Leave --task out, or use `finetune run`.",
        )
    scorer = scorer_of(score)
    if scorer.function is not None:
        check_function(score)
    else:
        source = models.locate(score)
        if source.kind == "folder":
            check_reward_model(Path(source.location), "rejection.score", score)
    prompts_found = _read_prompts(settings)
    if prompts_found is None:
        return PlannedRejection(
            settings=settings, trained=settings, prompts=None, held_out=None, longest=None
        )
    prompts = len(prompts_found)
    selected = math.ceil(prompts * settings.rejection.top_share)
    held_out = 0
    evaluation = run_config.evaluate_on_test_split(settings).evaluation
    if evaluation.fraction and evaluation.dataset is None and selected > 1:
        held_out = min(max(1, round(evaluation.fraction * selected)), 256, selected - 1)
    settings = settings.limit_batch(selected - held_out)
    if selected - held_out < settings.batch_size:
        raise UserError(
            f"global_batch_size {settings.batch_size} is more than the {selected - held_out:,} answers "
            f"that can be kept to train on, of {prompts:,} prompts.",
            f"Give --global-batch-size {max(1, selected - held_out)} or less, or more prompts.",
        )
    trained = settings.model_copy(update={"max_steps": settings.steps_of(selected - held_out)})
    return PlannedRejection(
        settings=settings,
        trained=trained,
        prompts=prompts,
        held_out=held_out,
        longest=max(map(_most_tokens, prompts_found), default=None),
    )


def _read_prompts(settings: Settings) -> list[Conversation] | None:
    """Read the rows that give prompts; None if the dataset must be downloaded first."""
    kind = sources.kind_of(settings.dataset)
    if kind not in ("built-in", "path"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        samples = preparation.read_samples(settings, sources.fetch(settings.dataset, Path(folder)))
        rows = (sample for sample in samples if isinstance(sample, Conversation))
        return list(itertools.islice(rows, settings.rejection.prompts))


def _most_tokens(row: Conversation) -> int:
    """Return an upper bound of a prompt's tokens: at most one per byte, plus those of the template."""
    if row.text is not None:
        return len(row.text.encode())
    turns = row.messages[:-1]
    return TEMPLATE_TOKENS + sum(len(turn.content.encode()) + TURN_TOKENS for turn in turns)


def _reward_model(score: str) -> ModelSpec | None:
    """Return the shape of the reward model; None if it is not accessible from here."""
    try:
        return models.resolve(score, online=True).spec
    except UserError:
        return None


def _placement(plan: Plan, stage: Stage) -> str:
    request = request_for(plan, stage.name)
    machine = f" of {request.instance_type}" if request.instance_type else ""
    return f"{stage.nodes} node{'s, each' if stage.nodes > 1 else ' with'} {request.gpus}{machine}"


def _batch(plan: Plan, planned: Generation) -> str:
    tokens = planned.batch_tokens
    text = f"up to {planned.batch_sequences:,} answers and {tokens:,} tokens at once, including padding"
    capacity = plan.prediction.memory.capacity_bytes
    if planned.fits is False and capacity is not None:
        text += (
            f"; the answers to one prompt of {planned.prompt_tokens:,} tokens do not fit into "
            f"{format_bytes(capacity)}, those to shorter ones may"
        )
    return text


def _stage_figures(plan: Plan, stage: Stage) -> str:
    figures = _figures(plan, stage.hours, stage.usd)
    return figures if stage.hours is not None or not stage.basis else f"{figures}: {stage.basis}"


def _total(plan: Plan) -> str:
    """Format the sum of known times and costs, and name the missing stages."""
    hours, usd, missing = generation.total(plan)
    exception = f"; not included: {', '.join(missing)}" if missing else ""
    return _figures(plan, hours, usd) + (exception if hours is not None else "")


def _row(name: str, text: str) -> str:
    return textwrap.fill(f"  {name:<9}{text}", WIDTH, subsequent_indent=" " * 11)


def _figures(plan: Plan, hours: Range | None, usd: Range | None) -> str:
    """Format time and price, as far as known."""
    time = "time unknown" if hours is None else _range(hours, lambda value: format_duration(value * 3600))
    if plan.target == "local":
        return time
    return f"{time}, {'price unknown' if usd is None else _range(usd, format_usd)}"


def _range(values: Range, format_value: Callable[[float], str]) -> str:
    low, high = (format_value(value) for value in values)
    return low if low == high else f"{low} to {high}"
