"""Moving average of the trained weights in fp32. Evaluations and exports use it instead of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


class MovingAverage:
    """Moving average, which each update replaces by ``rate * average + (1 - rate) * weights``.

    The rate of update n is 0 for n = 1, else the lower of ``decay`` and n / (n + 9), so that the base's
    weights soon lose influence (as in diffusers' EMAModel, 0.42).

    Parameters
    ----------
    trained:
        Parameters by name; if they are sharded, so are their averages.
    updates:
        Number of updates before a resumed run, whose averages are then loaded into :attr:`weights`.
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
