"""Moving average of the trained weights, in fp32, which is evaluated and exported instead of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


class MovingAverage:
    """With the n-th update the average becomes ``rate * average + (1 - rate) * weights``.

    ``rate`` is ``decay``, or n / (n + 9) where that is lower, and 0 in the first: the base's weights are
    soon forgotten (as in diffusers' EMAModel, 0.42).

    Parameters
    ----------
    trained:
        Parameters by name, whole or a rank's parts; their averages are divided like them.
    updates:
        Number of updates before a resumed run continues; its averages are then loaded into :attr:`weights`.
    """

    def __init__(self, trained: Iterable[tuple[str, nn.Parameter]], decay: float, updates: int = 0) -> None:
        self._trained = dict(trained)
        self._decay, self._updates = decay, updates
        self.weights = {name: parameter.detach().float().clone() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights after an optimizer step."""
        self._updates += 1
        rate = min(self._decay, self._updates / (self._updates + 9)) if self._updates > 1 else 0.0
        for name, average in self.weights.items():
            average.sub_((average - self._trained[name].float()) * (1 - rate))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters by their averages within the block; the weights are kept in host memory."""
        with torch.no_grad():
            backup = {
                name: parameter.detach().to("cpu", copy=True) for name, parameter in self._trained.items()
            }
            for name, parameter in self._trained.items():
                parameter.copy_(self.weights[name])
            try:
                yield
            finally:
                for name, parameter in self._trained.items():
                    parameter.copy_(backup[name].to(parameter.device))
