"""Losses over pairs of a chosen and a rejected answer, as defined by TRL 1.16.

Inputs are the log-probabilities of complete answers, as tensors of [pairs]; the result is one loss per pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """A model's log-probabilities of both answers of each pair: tensors of [pairs]."""

    chosen: torch.Tensor  # sum of the log-probabilities of the answer's tokens
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor  # number of these tokens
    rejected_tokens: torch.Tensor

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean log-probability per token of the chosen and of the rejected answers."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens

    def detached(self) -> Answers:
        """Return a copy without gradients."""
        return self._each(torch.Tensor.detach)

    def on_cpu(self) -> Answers:
        """Return a copy in host memory."""
        return self._each(torch.Tensor.cpu)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
        return Answers(
            **{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Concatenate the answers of several batches."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of both answers of each pair: tensors of [pairs]."""

    chosen: torch.Tensor
    rejected: torch.Tensor

    def detached(self) -> Rewards:
        """Return a copy without gradients."""
        return Rewards(chosen=self.chosen.detach(), rejected=self.rejected.detach())

    @classmethod
    def joined(cls, parts: Sequence[Rewards]) -> Rewards:
        """Concatenate the rewards of several batches."""
        return cls(
            chosen=torch.cat([part.chosen for part in parts]),
            rejected=torch.cat([part.rejected for part in parts]),
        )

    def means(self) -> dict[str, float]:
        """Divide :meth:`sums` by the number of pairs."""
        return {name: value.item() / len(self.chosen) for name, value in self.sums().items()}

    def sums(self) -> dict[str, torch.Tensor]:
        """Sum rewards, margins and correctly ranked pairs over all pairs; a tie counts as half correct."""
        margins = self.chosen - self.rejected
        correct = (margins > 0).float() + (margins == 0).float() / 2
        return {
            "reward_chosen": self.chosen.sum(),
            "reward_rejected": self.rejected.sum(),
            "reward_margin": margins.sum(),
            "accuracy": correct.sum(),
        }


def dpo_rewards(policy: Answers, reference: Answers, beta: float) -> Rewards:
    """Compute beta (log pi - log pi_ref): Rafailov et al. 2023 (arXiv:2305.18290), section 4."""
    return Rewards(
        chosen=beta * (policy.chosen - reference.chosen),
        rejected=beta * (policy.rejected - reference.rejected),
    )


def simpo_rewards(policy: Answers, beta: float) -> Rewards:
    """Compute beta times the mean log-probability: Meng et al. 2024 (arXiv:2405.14734), equation 4."""
    chosen, rejected = policy.means
    return Rewards(chosen=beta * chosen, rejected=beta * rejected)


def orpo_rewards(policy: Answers, beta: float) -> Rewards:
    """Compute SimPO's rewards, which TRL's ORPOTrainer reports for ORPO."""
    return simpo_rewards(policy, beta)


def sigmoid_loss(rewards: Rewards, *, margin: float = 0.0, label_smoothing: float = 0.0) -> torch.Tensor:
    """Compute -log sigmoid(chosen reward - rejected reward - margin): the loss of DPO (no margin) and SimPO.

    ``label_smoothing``: assumed share of pairs whose answers are swapped (Chowdhury et al. 2024,
    arXiv:2403.00409, without their division by 1 - 2 label_smoothing).
    """
    difference = rewards.chosen - rewards.rejected - margin
    return -logsigmoid(difference) * (1 - label_smoothing) - logsigmoid(-difference) * label_smoothing


def kto_loss(
    log_ratios: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor, beta: float
) -> torch.Tensor:
    """Compute 1 - sigmoid(beta (log pi - log pi_ref - kl)), with the sign reversed for undesirable answers.

    ``kl``: scalar, at least 0. ``desirable``: bool [answers]. Returns [answers].
    """
    difference = log_ratios - kl
    return 1 - torch.sigmoid(beta * torch.where(desirable, difference, -difference))


def reward_accuracy(rewards: torch.Tensor, desirable: torch.Tensor) -> torch.Tensor:
    """Return [answers]: 1 if the reward has the correct sign (+ for desirable answers), 0.5 if it is 0."""
    return torch.where(desirable, rewards > 0, rewards < 0).float() + (rewards == 0).float() / 2


def odds_ratio_loss(policy: Answers) -> torch.Tensor:
    """Compute -log sigmoid of the log odds ratio: Hong et al. 2024 (arXiv:2403.07691), equation 7."""
    chosen, rejected = policy.means
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -logsigmoid(log_odds)
