"""torchtune's DPO loss, with its metrics summed over a step."""

from __future__ import annotations

from typing import Any

import torch

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.engines.loop.preference_losses import Rewards

with torchtune_imports():
    from torchtune.rlhf.loss import DPOLoss


class PairLoss:
    """DPO loss that sums its losses and metrics until :meth:`take_sums` is called.

    The single-device recipe logs only the figures of a step's last micro batch.
    """

    metrics = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy")

    def __init__(self, beta: float, label_smoothing: float) -> None:
        self._loss: Any = DPOLoss(beta=beta, label_smoothing=label_smoothing)
        self._sums = torch.zeros(2 + len(self.metrics))

    def __call__(self, *log_probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return losses and the rewards of both answers, [pairs] each, like torchtune's loss."""
        losses, chosen, rejected = self._loss(*log_probabilities)
        rewards = Rewards(chosen=chosen.float(), rejected=rejected.float()).sums()
        summed = [losses.detach().float().sum(), *(rewards[name] for name in self.metrics)]
        self._sums = self._sums.to(losses.device)
        self._sums += torch.stack([torch.full_like(summed[0], len(losses)), *summed])
        return losses, chosen, rejected

    def take_sums(self) -> torch.Tensor:
        """Return sums since the last call, [2 + metrics]: pairs, losses, metrics."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums
