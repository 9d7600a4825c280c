"""Loss and metrics of a run's task on a batch.

Both are means over the global batch, so the result does not depend on the number of micro batches and ranks:
over the labels that count for next-token training, over pairs for preferences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from estimator.plan import Layout
from estimator.vocabulary import IMAGE_TASK, TASKS
from launchers.dataset.batches import (
    ImageInputs,
    MicroBatch,
    copy_to_device,
    count_labels,
    log_probabilities,
    micro_batches,
    mismatched_batches,
    step_rows,
    summed_cross_entropy,
)
from launchers.dataset.prepared import IGNORE, Prepared
from launchers.engines.loop import preference_losses
from launchers.engines.loop.outcome import Outcome, StepCounts
from launchers.engines.loop.preference_losses import Answers
from launchers.engines.loop.sharding import Answering
from launchers.settings import Settings


class Task(Protocol):
    """One kind of training. Each task has its own type of batches."""

    metrics: ClassVar[tuple[str, ...]]  # names of the figures in addition to the loss

    def check(self, model: Answering, data: Prepared, /) -> None:
        """Raise ValueError if the prepared data does not fit the model."""
        ...

    def begin(self, model: Answering, data: Prepared, layout: Layout, step: int, rank: int, /) -> None:
        """Compute values that depend on all ranks, before a step's first micro batch; every rank calls it."""
        ...

    def batches(self, data: Prepared, layout: Layout, step: int, rank: int, /) -> Iterator[Any]:
        """Iterate over a rank's micro batches of a step, for :meth:`outcome`; step 0 is the first."""
        ...

    def counts(self, data: Prepared, step: int, global_batch_size: int, /) -> StepCounts:
        """Return the divisor of a step; step 0 is the first."""
        ...

    def outcome(self, model: Answering, batch: Any, counts: StepCounts, /) -> Outcome:
        """Run the forward pass, or passes, of one micro batch."""
        ...


class TextTask(Task, Protocol):
    """A task on rows of tokens."""

    pairs: ClassVar[bool]


class OfRows:
    """Common part of tasks on rows of tokens.

    ``reference``: file of launchers.evaluation.reference, if the run has one. ``fused``: the model's head
    computes the loss or log-probabilities without logits (head.py). ``padding_free``: rows are
    concatenated without padding (launchers.dataset.batches.MicroBatch). ``images``: builds the image inputs
    of a vision-language model.
    """

    pairs: ClassVar[bool] = False  # whether a row is a pair

    def __init__(
        self,
        reference: Path | None,
        *,
        fused: bool = False,
        padding_free: bool = False,
        images: ImageInputs | None = None,
    ) -> None:
        self.reference: NDArray[np.float32] | None = None if reference is None else np.load(reference)
        self.fused, self.padding_free, self.images = fused, padding_free, images

    def batches(self, data: Prepared, layout: Layout, step: int, rank: int, /) -> Iterator[MicroBatch]:
        return micro_batches(
            data,
            layout,
            step,
            rank,
            pairs=self.pairs,
            reference=self.reference,
            padding_free=self.padding_free,
            images=self.images,
        )

    def log_probabilities(self, model: Answering, batch: MicroBatch, labels: torch.Tensor) -> torch.Tensor:
        """Return [sequences, positions]: log-probabilities of ``labels``, 0 where they do not count."""
        if self.fused:
            return model.fused_loss(labels, **batch.inputs)
        return log_probabilities(model.logits(**batch.inputs), labels)


class NextToken(OfRows):
    """Next-token prediction: the mean cross entropy of the labels that count."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def check(self, _model: Answering, _data: Prepared, /) -> None:
        """Accept any model that predicts tokens."""

    def begin(self, *_: object) -> None:
        """Do nothing: micro batches are independent."""

    def counts(self, data: Prepared, step: int, global_batch_size: int) -> StepCounts:
        return StepCounts(divisor=max(1, count_labels(data, step, global_batch_size)))

    def outcome(self, model: Answering, batch: MicroBatch, _: StepCounts, /) -> Outcome:
        if self.fused:
            return Outcome(loss=model.fused_loss(batch.labels, **batch.inputs))
        return Outcome(loss=summed_cross_entropy(model.logits(**batch.inputs), batch.labels))


class Preferences(OfRows):
    """DPO, ORPO or SimPO, on pairs."""

    pairs: ClassVar = True
    metrics: ClassVar[tuple[str, ...]] = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy")

    def check(self, _model: Answering, _data: Prepared, /) -> None:
        """Accept any model that predicts tokens."""

    def begin(self, *_: object) -> None:
        """Do nothing: micro batches are independent."""

    def __init__(
        self, settings: Settings, reference: Path | None = None, *, padding_free: bool = False
    ) -> None:
        super().__init__(reference, fused=settings.liger is True, padding_free=padding_free)
        self._task = settings.task
        self._beta = settings.preference.beta_of(settings.task)
        self._margin = settings.preference.margin
        self._smoothing = settings.preference.label_smoothing

    def counts(self, data: Prepared, step: int, global_batch_size: int) -> StepCounts:
        tokens = 0
        if self._task == "orpo":
            rows = step_rows(data, step, global_batch_size)
            tokens = sum(int(data.row(index).lengths[0]) - 1 for index in rows)
        return StepCounts(divisor=global_batch_size, tokens=tokens)

    def outcome(self, model: Answering, batch: MicroBatch, counts: StepCounts, /) -> Outcome:
        reference = None
        if batch.reference is not None:
            chosen, rejected = batch.reference.unbind(1)
            lengths = batch.sum_by_sequence(batch.labels != IGNORE).chunk(2)
            reference = Answers(
                chosen=chosen, rejected=rejected, chosen_tokens=lengths[0], rejected_tokens=lengths[1]
            )
        elif self._task == "dpo":
            with torch.no_grad(), without_adapters(model):
                reference = _answers(self.log_probabilities(model, batch, batch.labels), batch)
        labels, counted = batch.labels, batch.labels != IGNORE
        if self._task == "orpo":
            chosen = chosen_labels(batch)
            labels = torch.where(counted, labels, chosen)
        per_token = self.log_probabilities(model, batch, labels)
        losses, rewards = self.losses(_answers(per_token * counted, batch), reference)
        loss = losses.sum()
        if self._task == "orpo":
            # ORPO's cross entropy is a mean over tokens: rescale its sum, because the divisor counts pairs
            cross_entropy = -(per_token * (chosen != IGNORE)).sum()
            loss = loss + cross_entropy * (counts.divisor / counts.tokens)
        return Outcome(loss=loss, metrics=rewards.sums())

    def losses(
        self, policy: Answers, reference: Answers | None
    ) -> tuple[torch.Tensor, preference_losses.Rewards]:
        """Return the preference loss of each pair [pairs], and both answers' rewards without gradients."""
        if self._task == "orpo":
            rewards = preference_losses.orpo_rewards(policy.detached(), self._beta)
            return self._beta * preference_losses.odds_ratio_loss(policy), rewards
        if self._task == "simpo":
            rewards, margin = preference_losses.simpo_rewards(policy, self._beta), self._margin
        elif reference is not None:
            rewards, margin = preference_losses.dpo_rewards(policy, reference, self._beta), 0.0
        else:
            raise ValueError("DPO compares with a reference, and there is none")
        losses = preference_losses.sigmoid_loss(rewards, margin=margin, label_smoothing=self._smoothing)
        return losses, rewards.detached()


class Reward(OfRows):
    """Training of a reward model on pairs: Ouyang et al. 2022 (arXiv:2203.02155), equation 1.

    The loss is the mean over pairs, as in TRL's RewardTrainer.
    """

    pairs: ClassVar = True
    metrics: ClassVar[tuple[str, ...]] = Preferences.metrics

    def check(self, model: Answering, data: Prepared, /) -> None:
        """Raise ValueError if the padding tokens differ, as transformers scores the last unpadded token."""
        model_pad_id = model.module.config.pad_token_id
        if model_pad_id != data.info.pad_id:
            raise ValueError(
                f"rows are padded with token {data.info.pad_id}, and the model expects {model_pad_id}"
            )

    def begin(self, *_: object) -> None:
        """Do nothing: micro batches are independent."""

    def counts(self, _data: Prepared, _step: int, global_batch_size: int) -> StepCounts:
        return StepCounts(divisor=global_batch_size)

    def outcome(self, model: Answering, batch: MicroBatch, _: StepCounts, /) -> Outcome:
        rewards = rewards_of(model.logits(**batch.inputs))
        return Outcome(loss=preference_losses.sigmoid_loss(rewards).sum(), metrics=rewards.detached().sums())


class Kto(OfRows):
    """KTO, on answers judged good or bad: Ethayarajh et al. 2024 (arXiv:2402.01306), equations 7 and 8.

    Same as TRL's KTOTrainer with equal weights for both kinds. Rewards are compared with an estimate of the
    KL divergence from the reference: the mean log ratio of answers to other prompts, over the global batch.
    """

    metrics: ClassVar[tuple[str, ...]] = ("reward_good", "reward_bad", "reward_margin", "accuracy", "kl")

    def __init__(
        self, settings: Settings, reference: Path | None = None, *, padding_free: bool = False
    ) -> None:
        super().__init__(reference, fused=settings.liger is True, padding_free=padding_free)
        self._beta = settings.preference.beta_of(settings.task)
        self._kl = torch.zeros(())

    def check(self, _model: Answering, _data: Prepared, /) -> None:
        """Accept any model that predicts tokens."""

    def begin(self, model: Answering, data: Prepared, layout: Layout, step: int, rank: int, /) -> None:
        """Estimate the KL divergence from the reference, from answers paired with other prompts."""
        log_ratios = torch.zeros((), device=model.device)
        batches = mismatched_batches(data, layout, step, rank, self.reference, padding_free=self.padding_free)
        for batch in batches:
            batch = batch.to(model.device)
            with torch.no_grad():
                policy = self._sums(model, batch)
            log_ratios += (policy - self._untrained(model, batch)).sum()
        dist.all_reduce(log_ratios)
        self._kl = (log_ratios / layout.global_batch_size).clamp(min=0)

    def counts(self, data: Prepared, step: int, global_batch_size: int) -> StepCounts:
        rows = step_rows(data, step, global_batch_size)
        return StepCounts(divisor=global_batch_size, good=sum(data.row(index).desirable for index in rows))

    def outcome(self, model: Answering, batch: MicroBatch, counts: StepCounts, /) -> Outcome:
        reference = self._untrained(model, batch)
        policy = self._sums(model, batch)
        if batch.desirable is None:
            raise ValueError("KTO learns from judged answers, and these are not")
        losses = preference_losses.kto_loss(policy - reference, batch.desirable, self._kl, self._beta)
        rewards = self._beta * (policy.detach() - reference)
        desirable, undesirable = batch.desirable, ~batch.desirable
        # the caller divides by the number of all answers; the means are over the answers of one kind
        desirable_reward = (rewards * desirable).sum() * counts.divisor / max(1, counts.good)
        undesirable_reward = (
            (rewards * undesirable).sum() * counts.divisor / max(1, counts.divisor - counts.good)
        )
        return Outcome(
            loss=losses.sum(),
            metrics={
                "reward_good": desirable_reward,
                "reward_bad": undesirable_reward,
                "reward_margin": desirable_reward - undesirable_reward,
                "accuracy": preference_losses.reward_accuracy(rewards, desirable).sum(),
                "kl": self._kl * len(rewards),
            },
        )

    def _sums(self, model: Answering, batch: MicroBatch) -> torch.Tensor:
        """Return [rows]: log-probability of each answer."""
        return batch.sum_by_sequence(self.log_probabilities(model, batch, batch.labels))

    def _untrained(self, model: Answering, batch: MicroBatch) -> torch.Tensor:
        """Return [rows]: log-probability of each answer under the untrained model."""
        if batch.reference is not None:
            return batch.reference[:, 0]
        with torch.no_grad(), without_adapters(model):
            return self._sums(model, batch)


def task_of(
    settings: Settings,
    reference: Path | None = None,
    *,
    padding_free: bool = False,
    images: ImageInputs | None = None,
) -> Task:
    """Build the task that a run's settings name, on rows of tokens or on images.

    ``reference``: file computed before training, if the task needs one (TrainJob.reference).
    ``padding_free``, ``images``: see :class:`OfRows`.
    """
    if TASKS[settings.task].images:
        from launchers.engines.loop.images import TextToImage  # needs diffusers

        if reference is None:
            raise ValueError(f"task {IMAGE_TASK} learns from latents, and there are none")
        return TextToImage(settings, reference)
    return text_task_of(settings, reference, padding_free=padding_free, images=images)


def text_task_of(
    settings: Settings,
    reference: Path | None = None,
    *,
    padding_free: bool = False,
    images: ImageInputs | None = None,
) -> TextTask:
    """Build a task on rows of tokens."""
    if TASKS[settings.task].judged:
        return Kto(settings, reference, padding_free=padding_free)
    if settings.task == "reward":
        return Reward(None)
    if settings.trains_on_pairs:
        return Preferences(settings, reference, padding_free=padding_free)
    return NextToken(None, fused=settings.liger is True, padding_free=padding_free, images=images)


@contextlib.contextmanager
def without_adapters(model: Answering) -> Iterator[None]:
    """Disable PEFT's adapters in the context, which gives the untrained model."""
    with model.module.disable_adapter():
        yield


def rewards_of(logits: torch.Tensor) -> preference_losses.Rewards:
    """Split a reward model's output [sequences, 1] for a batch of all chosen, then all rejected answers."""
    chosen, rejected = logits.squeeze(-1).float().chunk(2)
    return preference_losses.Rewards(chosen=chosen, rejected=rejected)


def answers_of(logits: torch.Tensor, batch: MicroBatch) -> Answers:
    """Compute the log-probabilities of a batch of all chosen, then all rejected answers, from its logits."""
    return _answers(log_probabilities(logits, batch.labels), batch)


def _answers(per_token: torch.Tensor, batch: MicroBatch) -> Answers:
    """Sum the tokens' log-probabilities (0 where labels do not count) over each answer."""
    chosen, rejected = batch.sum_by_sequence(per_token).chunk(2)
    chosen_tokens, rejected_tokens = batch.sum_by_sequence(batch.labels != IGNORE).chunk(2)
    return Answers(
        chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens
    )


def chosen_cross_entropy(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the summed cross entropy of the chosen conversations with prompts, as in TRL's ORPOTrainer."""
    return summed_cross_entropy(logits, chosen_labels(batch))


def chosen_labels(batch: MicroBatch) -> torch.Tensor:
    """Return labels of all tokens of the chosen conversations with prompts; shaped like ``batch.labels``."""
    pairs = len(batch.lengths) // 2
    labels = batch.input_ids.roll(-1, dims=1)
    positions = torch.arange(labels.shape[1], device=labels.device)
    if batch.cu_seq_lens is not None:
        labels[:, batch.cu_seq_lens[1 : pairs + 1] - 1] = IGNORE  # ends of conversations
        return labels.masked_fill(positions >= int(batch.lengths[:pairs].sum()), IGNORE)
    last = copy_to_device(batch.lengths - 1, labels.device)
    last[pairs:] = 0  # rejected
    return labels.masked_fill(positions[None, :] >= last[:, None], IGNORE)
