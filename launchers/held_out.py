"""How good a model is on held-out rows, by the measure of its task; base and result are scored alike.

The first model that a scorer is given is what preferences are compared with: their reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
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

# Tokens, padding included, of answers that are drawn together, whose logits are of one position
DRAWN_TOKENS = {"cuda": 65536, "cpu": 16384}


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A model on the held-out rows."""

    loss: float  # mean cross entropy over all labels that count; of preferences the task's mean over rows;
    # of grpo minus the mean reward
    labels: int
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)  # the task's own figures by name

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Held-out pairs of whose order a reward model is about equally sure."""

    sure: float  # mean of the larger of sigmoid(margin) and sigmoid(-margin), 0.5 to 1
    right: float  # share of them that it ranks right; a tie is half right
    pairs: int


class Scorer(Protocol):
    """Scores models one after the other on the same rows."""

    calibration: tuple[CalibrationBin, ...]  # of the reward model that was scored last; else empty

    def score(self, model: Any) -> Score:
        """A transformers model's mean loss, and its figures."""
        ...


def scorer_of(
    settings: RunConfig,
    data: Prepared,
    max_rows: int,
    *,
    tokenizer_dir: Path | None = None,
    reward: str | None = None,
) -> Scorer:
    """The measure of the settings' task on the first ``max_rows`` rows.

    ``tokenizer_dir``: of the model whose answers are drawn; ``reward``: what scores them, on this machine.
    """
    if TASKS[settings.task].draws_answers:
        if tokenizer_dir is None or reward is None:
            raise ValueError("answers of grpo are measured by their rewards, and nothing gives them any")
        return _Drawn(settings, data, max_rows, tokenizer_dir, reward)
    if TASKS[settings.task].judged:
        return _Judged(settings, data, max_rows)
    if settings.task == "reward":
        return _Rewards(settings, data, max_rows)
    kind = _Preferences if settings.trains_on_pairs else _NextToken
    return kind(settings, data, max_rows)


class _Scorer:
    """What all measures have in common: the rows, and how they go through a model."""

    calibration: tuple[CalibrationBin, ...] = ()

    def __init__(self, settings: RunConfig, data: Prepared, max_rows: int) -> None:
        self._settings, self._data = settings, data
        self._rows = range(min(max_rows, len(data)))

    def _logits(self, model: Any) -> Iterator[tuple[list[int], MicroBatch, Any]]:
        """Batch by batch: which rows, the batch, and what the model makes of it."""
        import torch

        from launchers.dataset.batches import collate, collate_pairs

        put_together = collate_pairs if self._settings.trains_on_pairs else collate
        with torch.inference_mode():
            for indices in batches_by_length(self._data, self._rows, MAX_BATCH_TOKENS[model.device.type]):
                rows = [self._data.row(index) for index in indices]
                batch = put_together(rows, self._data.info.pad_id).to(model.device)
                yield indices, batch, model(**batch.inputs, use_cache=False).logits

    def _score(self, losses: Any, labels: int, metrics: dict[str, float], *, beside: float = 0.0) -> Score:
        """Of a loss for each row; ``beside`` is added to their mean."""
        loss = losses.mean().item() + beside
        return Score(loss=loss, labels=labels, rows=len(self._rows), metrics=metrics)


class _NextToken(_Scorer):
    """The mean cross entropy of the labels that count."""

    def score(self, model: Any) -> Score:
        from launchers.dataset.batches import summed_cross_entropy

        total, labels = 0.0, 0
        for _, batch, logits in self._logits(model):
            total += summed_cross_entropy(logits, batch.labels.to(logits.device)).item()
            labels += _labels(batch)
        return Score(loss=total / max(1, labels), labels=labels, rows=len(self._rows))


class _Preferences(_Scorer):
    """DPO's, ORPO's or SimPO's loss on pairs."""

    _reference: Answers | None = None

    def score(self, model: Any) -> Score:
        from launchers.engines.loop.preference_losses import Answers
        from launchers.engines.loop.tasks import Preferences, answers_of, chosen_cross_entropy

        found, cross_entropy, tokens, labels = [], 0.0, 0, 0
        for indices, batch, logits in self._logits(model):
            found.append(answers_of(logits, batch).on_cpu())
            cross_entropy += chosen_cross_entropy(logits, batch).item()
            tokens += sum(int(self._data.row(index).lengths[0]) - 1 for index in indices)
            labels += _labels(batch)
        policy = Answers.joined(found)
        self._reference = self._reference or policy
        losses, rewards = Preferences(self._settings).losses(policy, self._reference)
        beside = cross_entropy / tokens if self._settings.task == "orpo" else 0.0
        return self._score(losses, labels, rewards.means(), beside=beside)


class _Rewards(_Scorer):
    """A reward model's loss on pairs."""

    def score(self, model: Any) -> Score:
        from launchers.engines.loop.preference_losses import Rewards, sigmoid_loss
        from launchers.engines.loop.tasks import rewards_of

        found, labels = [], 0
        for _, batch, logits in self._logits(model):
            found.append(rewards_of(logits.cpu()))
            labels += _labels(batch)
        rewards = Rewards.joined(found)
        self.calibration = calibrate((rewards.chosen - rewards.rejected).tolist())
        return self._score(sigmoid_loss(rewards), labels, rewards.means())


class _Judged(_Scorer):
    """KTO's loss on judged answers, at a divergence of 0.

    How far the model has moved is no part of how well it tells good answers from bad ones.
    """

    _reference: dict[int, float] | None = None

    def score(self, model: Any) -> Score:
        import torch

        from launchers.dataset.batches import summed_log_probabilities
        from launchers.engines.loop.preference_losses import kto_loss, told_right

        found, labels = dict[int, float](), 0
        for indices, batch, logits in self._logits(model):
            sums = summed_log_probabilities(logits, batch)
            found |= dict(zip(indices, sums.tolist(), strict=True))
            labels += _labels(batch)
        self._reference = self._reference or found
        beta = self._settings.preference.beta_of("kto")
        ratios = torch.tensor([found[index] - self._reference[index] for index in self._rows])
        good = torch.tensor([self._data.row(index).desirable for index in self._rows])
        rewards = beta * ratios
        metrics = {"accuracy": told_right(rewards, good).mean().item()}
        for name, kind in (("reward_good", good), ("reward_bad", ~good)):
            if kind.any():
                metrics[name] = rewards[kind].mean().item()
        return self._score(kto_loss(ratios, good, torch.zeros(()), beta), labels, metrics)


class _Drawn(_Scorer):
    """The mean reward of answers that are drawn to the held-out prompts, one to each, as training draws them.

    Both models draw with the same seed.
    """

    def __init__(
        self, settings: RunConfig, data: Prepared, max_rows: int, tokenizer_dir: Path, reward: str
    ) -> None:
        from launchers.dataset import prompts, render
        from launchers.dataset.prepared import PROMPTS

        super().__init__(settings, data, max_rows)
        self._prompts = prompts.read_written(data.folder / PROMPTS)
        self._tokenizer = render.load_tokenizer(tokenizer_dir, settings)
        self._reward = reward
        self._rewards: Rewards | None = None

    def score(self, model: Any) -> Score:
        import torch

        from launchers.scoring.rewards import rewards_of

        device = model.device.type
        if self._rewards is None:
            shown = self._settings.rl.reward or self._reward
            self._rewards = rewards_of(self._reward, shown, device, bf16=device == "cuda")
        torch.manual_seed(self._settings.seed)
        new = self._settings.rl.answer_tokens(self._settings.seq_len)
        most = DRAWN_TOKENS[device]
        rewards: list[float] = []
        lengths: list[int] = []
        left = sorted(self._rows, key=lambda index: -int(self._data.row(index).lengths[0]))
        while left:
            width = int(self._data.row(left[0]).lengths[0]) + new
            batch, left = left[: max(1, most // width)], left[max(1, most // width) :]
            drawn = self._draw(model, batch, new)
            texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
            rewards += self._rewards([self._prompts[index] for index in batch], texts)
            lengths += [len(ids) for ids in drawn]
        mean = sum(rewards) / len(rewards)
        figures = {"reward": mean, "answer_tokens": sum(lengths) / len(lengths)}
        return Score(loss=-mean, labels=sum(lengths), rows=len(rewards), metrics=figures)

    def _draw(self, model: Any, indices: list[int], new: int) -> list[list[int]]:
        """The tokens of an answer to each prompt, the one that ends it included."""
        import torch

        pad = self._data.info.pad_id
        prompts = [torch.from_numpy(self._data.row(index).tokens.copy()).long() for index in indices]
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros_like(ids)
        for place, tokens in enumerate(prompts):
            ids[place, width - len(tokens) :] = tokens
            mask[place, width - len(tokens) :] = 1
        with torch.inference_mode():
            output = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=True,
                temperature=self._settings.rl.temperature,
                top_p=1.0,
                top_k=0,
                max_new_tokens=new,
                pad_token_id=pad,
            )
        ends = model.generation_config.eos_token_id
        ends = self._tokenizer.eos_token_id if ends is None else ends
        ends = set(ends) if isinstance(ends, list) else {ends}
        return [_until(tokens, ends) for tokens in output[:, width:].tolist()]


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to the first that ends an answer."""
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def calibrate(margins: list[float]) -> tuple[CalibrationBin, ...]:
    """Pairs by how sure of their order a reward model is, in bins of a tenth; empty ones are left out.

    ``margins``: the chosen answer's reward less the rejected one's.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        sure = 1 / (1 + math.exp(-min(abs(margin), 700.0)))
        right = 0.5 if margin == 0 else float(margin > 0)
        bins.setdefault(min(int(sure * 10), 9), []).append((sure, right))
    return tuple(
        CalibrationBin(
            sure=sum(sure for sure, _ in found) / len(found),
            right=sum(right for _, right in found) / len(found),
            pairs=len(found),
        )
        for _, found in sorted(bins.items())
    )


def _labels(batch: MicroBatch) -> int:
    return int((batch.labels >= 0).sum())
