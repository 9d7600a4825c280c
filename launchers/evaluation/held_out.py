"""Scorers of models on held-out rows, one per task; base and finished model are scored in the same way.

For preference losses, the first model that a scorer receives is the reference model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from estimator.vocabulary import TASKS
from launchers.dataset.measured import MAX_BATCH_TOKENS, batches_by_length
from launchers.run_config import RunConfig

if TYPE_CHECKING:
    from pathlib import Path

    from launchers.dataset.batches import MicroBatch
    from launchers.dataset.prepared import Prepared
    from launchers.engines.loop.preference_losses import Answers
    from launchers.scoring.rewards import Rewards

# Maximum tokens of a generation batch, including padding; more than for losses, because logits are needed at
# a single position only
SAMPLED_TOKENS = {"cuda": 65536, "cpu": 16384}


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score of a model on the held-out rows."""

    # Mean cross entropy over the labels; preference tasks: mean of the task's loss over rows; grpo: negative
    # mean reward
    loss: float
    labels: int
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)  # task-specific figures by name

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite if it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Held-out pairs that a reward model ranks with similar confidence."""

    confidence: float  # mean of the larger of sigmoid(margin) and sigmoid(-margin), 0.5 to 1
    right: float  # share of pairs ranked correctly; a tie counts half
    pairs: int


class Scorer(Protocol):
    """Scorer of models, one after the other, on the same rows."""

    calibration: tuple[CalibrationBin, ...]  # of the reward model scored last; empty for other tasks

    def score(self, model: Any) -> Score:
        """Return a transformers model's mean loss and the task's metrics."""
        ...


def scorer_of(
    settings: RunConfig,
    data: Prepared,
    max_rows: int,
    *,
    tokenizer_dir: Path | None = None,
    reward: str | None = None,
) -> Scorer:
    """Build the scorer of the settings' task on the first ``max_rows`` rows.

    ``tokenizer_dir``: folder with the tokenizer, for sampled answers and images. ``reward``: reward function
    or model for sampled answers, as a path on this machine.
    """
    if TASKS[settings.task].draws_answers:
        if tokenizer_dir is None or reward is None:
            raise ValueError("task grpo needs tokenizer_dir and reward to score answers")
        return _SampledAnswers(settings, data, max_rows, tokenizer_dir, reward)
    if TASKS[settings.task].judged:
        return _Judged(settings, data, max_rows)
    if settings.task == "reward":
        return _Rewards(settings, data, max_rows)
    if settings.trains_on_pairs:
        return _Preferences(settings, data, max_rows)
    return _NextToken(settings, data, max_rows, tokenizer_dir if settings.vision is not None else None)


class _Scorer:
    """Base class of scorers: selects the rows and runs a model on them."""

    calibration: tuple[CalibrationBin, ...] = ()

    def __init__(
        self, settings: RunConfig, data: Prepared, max_rows: int, processor_dir: Path | None = None
    ) -> None:
        self._settings, self._data = settings, data
        self._rows = range(min(max_rows, len(data)))
        self._processor_dir = processor_dir  # of a vision-language model

    def _logits(self, model: Any) -> Iterator[tuple[list[int], MicroBatch, Any]]:
        """Iterate over (row indices, micro batch, logits of the model) by batch."""
        import torch

        from launchers.dataset.batches import collate, collate_pairs
        from launchers.dataset.render import load_tokenizer

        images = None
        if self._processor_dir is not None:
            images = load_tokenizer(self._processor_dir, self._settings)
        collate_rows = collate_pairs if self._settings.trains_on_pairs else partial(collate, images=images)
        with torch.inference_mode():
            for indices in batches_by_length(self._data, self._rows, MAX_BATCH_TOKENS[model.device.type]):
                rows = [self._data.row(index) for index in indices]
                batch = collate_rows(rows, self._data.info.pad_id).to(model.device)
                yield indices, batch, model(**batch.inputs, use_cache=False).logits

    def _score(
        self, losses: Any, labels: int, metrics: dict[str, float], *, added_loss: float = 0.0
    ) -> Score:
        """Build the score from one loss per row; ``added_loss`` is added to their mean."""
        loss = losses.mean().item() + added_loss
        return Score(loss=loss, labels=labels, rows=len(self._rows), metrics=metrics)


class _NextToken(_Scorer):
    """Scorer by mean cross entropy over the labels."""

    def score(self, model: Any) -> Score:
        from launchers.dataset.batches import summed_cross_entropy

        total, labels = 0.0, 0
        for _, batch, logits in self._logits(model):
            total += summed_cross_entropy(logits, batch.labels.to(logits.device)).item()
            labels += _count_labels(batch)
        return Score(loss=total / max(1, labels), labels=labels, rows=len(self._rows))


class _Preferences(_Scorer):
    """Scorer of pairs by the loss of DPO, ORPO or SimPO."""

    _reference: Answers | None = None

    def score(self, model: Any) -> Score:
        from launchers.engines.loop.preference_losses import Answers
        from launchers.engines.loop.tasks import Preferences, answers_of, chosen_cross_entropy

        batches, cross_entropy, tokens, labels = [], 0.0, 0, 0
        for indices, batch, logits in self._logits(model):
            batches.append(answers_of(logits, batch).on_cpu())
            cross_entropy += chosen_cross_entropy(logits, batch).item()
            tokens += sum(int(self._data.row(index).lengths[0]) - 1 for index in indices)
            labels += _count_labels(batch)
        policy = Answers.joined(batches)
        self._reference = self._reference or policy
        losses, rewards = Preferences(self._settings).losses(policy, self._reference)
        added_loss = cross_entropy / tokens if self._settings.task == "orpo" else 0.0
        return self._score(losses, labels, rewards.means(), added_loss=added_loss)


class _Rewards(_Scorer):
    """Scorer of a reward model by its loss on pairs."""

    def score(self, model: Any) -> Score:
        from launchers.engines.loop.preference_losses import Rewards, sigmoid_loss
        from launchers.engines.loop.tasks import rewards_of

        batches, labels = [], 0
        for _, batch, logits in self._logits(model):
            batches.append(rewards_of(logits.cpu()))
            labels += _count_labels(batch)
        rewards = Rewards.joined(batches)
        self.calibration = calibrate((rewards.chosen - rewards.rejected).tolist())
        return self._score(sigmoid_loss(rewards), labels, rewards.means())


class _Judged(_Scorer):
    """Scorer of judged answers by the loss of KTO, with a divergence of 0.

    The divergence from the reference model does not measure how well good and bad answers are separated.
    """

    _reference: dict[int, float] | None = None

    def score(self, model: Any) -> Score:
        import torch

        from launchers.dataset.batches import summed_log_probabilities
        from launchers.engines.loop.preference_losses import kto_loss, reward_accuracy

        log_probabilities, labels = dict[int, float](), 0
        for indices, batch, logits in self._logits(model):
            sums = summed_log_probabilities(logits, batch)
            log_probabilities |= dict(zip(indices, sums.tolist(), strict=True))
            labels += _count_labels(batch)
        self._reference = self._reference or log_probabilities
        beta = self._settings.preference.beta_of("kto")
        ratios = torch.tensor([log_probabilities[index] - self._reference[index] for index in self._rows])
        desirable = torch.tensor([self._data.row(index).desirable for index in self._rows])
        rewards = beta * ratios
        metrics = {"accuracy": reward_accuracy(rewards, desirable).mean().item()}
        for name, kind in (("reward_good", desirable), ("reward_bad", ~desirable)):
            if kind.any():
                metrics[name] = rewards[kind].mean().item()
        return self._score(kto_loss(ratios, desirable, torch.zeros(()), beta), labels, metrics)


class _SampledAnswers(_Scorer):
    """Scorer by mean reward of sampled answers, one per held-out prompt.

    Answers are sampled as in training, for both models with the same seed.
    """

    def __init__(
        self, settings: RunConfig, data: Prepared, max_rows: int, tokenizer_dir: Path, reward: str
    ) -> None:
        from launchers.dataset import prompts, render
        from launchers.dataset.prepared import PROMPTS

        super().__init__(settings, data, max_rows)
        self._prompts = prompts.read_prompts(data.folder / PROMPTS)
        self._tokenizer = render.load_tokenizer(tokenizer_dir, settings)
        self._reward = reward
        self._rewards: Rewards | None = None

    def score(self, model: Any) -> Score:
        import torch

        from launchers.scoring.rewards import rewards_of

        device = model.device.type
        if self._rewards is None:
            reward_name = self._settings.rl.reward or self._reward
            self._rewards = rewards_of(self._reward, reward_name, device, bf16=device == "cuda")
        torch.manual_seed(self._settings.seed)
        max_new_tokens = self._settings.rl.answer_tokens(self._settings.seq_len)
        max_tokens = SAMPLED_TOKENS[device]
        rewards: list[float] = []
        lengths: list[int] = []
        remaining = sorted(self._rows, key=lambda index: -int(self._data.row(index).lengths[0]))
        while remaining:
            width = int(self._data.row(remaining[0]).lengths[0]) + max_new_tokens
            count = max(1, max_tokens // width)
            batch, remaining = remaining[:count], remaining[count:]
            answers = self._sample(model, batch, max_new_tokens)
            texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
            rewards += self._rewards([self._prompts[index] for index in batch], texts)
            lengths += [len(ids) for ids in answers]
        mean = sum(rewards) / len(rewards)
        figures = {"reward": mean, "answer_tokens": sum(lengths) / len(lengths)}
        return Score(loss=-mean, labels=sum(lengths), rows=len(rewards), metrics=figures)

    def _sample(self, model: Any, indices: list[int], max_new_tokens: int) -> list[list[int]]:
        """Sample an answer to each prompt; return its token ids, including the end token."""
        import torch

        pad = self._data.info.pad_id
        prompts = [torch.from_numpy(self._data.row(index).tokens.copy()).long() for index in indices]
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros_like(ids)
        for index, tokens in enumerate(prompts):
            ids[index, width - len(tokens) :] = tokens
            mask[index, width - len(tokens) :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=True,
                temperature=self._settings.rl.temperature,
                top_p=1.0,
                top_k=0,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad,
            )
        eos_ids = model.generation_config.eos_token_id
        eos_ids = self._tokenizer.eos_token_id if eos_ids is None else eos_ids
        eos_ids = set(eos_ids) if isinstance(eos_ids, list) else {eos_ids}
        return [_truncate_after_end(tokens, eos_ids) for tokens in output[:, width:].tolist()]


def _truncate_after_end(tokens: list[int], eos_ids: set[int]) -> list[int]:
    """Truncate the tokens after the first end token."""
    end = next((index for index, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tokens[: end + 1]


def calibrate(margins: list[float]) -> tuple[CalibrationBin, ...]:
    """Group pairs by the reward model's confidence in their order, in non-empty bins of width 0.1.

    ``margins``: reward of the chosen answer minus reward of the rejected one, by pair.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 700.0)))
        accuracy = 0.5 if margin == 0 else float(margin > 0)
        bins.setdefault(min(int(confidence * 10), 9), []).append((confidence, accuracy))
    return tuple(
        CalibrationBin(
            confidence=sum(confidence for confidence, _ in pairs) / len(pairs),
            right=sum(accuracy for _, accuracy in pairs) / len(pairs),
            pairs=len(pairs),
        )
        for _, pairs in sorted(bins.items())
    )


def _count_labels(batch: MicroBatch) -> int:
    """Count the tokens of a batch that count in the loss."""
    return int((batch.labels >= 0).sum())
