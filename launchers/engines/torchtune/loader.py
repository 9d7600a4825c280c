"""A recipe's data loader with batches on the device, read ahead of their use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.dataset.batches import copy_to_device

with torchtune_imports():
    from torchtune.modules import attention_utils


class DeviceLoader:
    """A recipe's data loader whose batches are on the device when the recipe receives them.

    They are copied to a GPU from page-locked memory without waiting, so the recipe's own copy is void.
    :meth:`prepare`, called after the launch of a forward pass, reads the next batch while the GPU computes.

    Parameters
    ----------
    before:
        Called with the number of each batch, from 1, before the recipe receives it.
    is_last:
        Called once the recipe has processed a batch; True ends the iteration.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        *,
        before: Callable[[int], None],
        is_last: Callable[[], bool],
    ) -> None:
        self._loader, self._device, self._before, self._is_last = loader, device, before, is_last
        self._iterator: Iterator[Any] = iter(())
        self._prepared: tuple[Any, int, int] | None = None  # batch, samples, tokens
        self._samples = self._tokens = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._iterator, self._prepared = iter(self._loader), None
        number = 0
        while (prepared := self._take()) is not None:
            batch, samples, tokens = prepared
            self._samples += samples
            self._tokens += tokens
            number += 1
            self._before(number)
            yield batch
            if self._is_last():
                return

    def _take(self) -> tuple[Any, int, int] | None:
        self.prepare()
        prepared, self._prepared = self._prepared, None
        return prepared

    def prepare(self) -> None:
        """Read the next batch and start its copy to the device, unless that has been done."""
        if self._prepared is None and (batch := next(self._iterator, None)) is not None:
            self._prepared = _on_device(batch, self._device), *self._loader.dataset.take_counts()

    def take_counts(self) -> tuple[int, int]:
        """Return the samples and tokens of the batches that the recipe received since the last call."""
        counts = self._samples, self._tokens
        self._samples = self._tokens = 0
        return counts

    @property
    def sampler(self) -> Any:
        """The sampler, whose epoch the recipes set."""
        return self._loader.sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, which the recipes save."""
        state: dict[str, Any] = self._loader.state_dict()
        return state


def _on_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch; flex attention's mask is on the GPU from the start."""
    if isinstance(batch, torch.Tensor):
        return copy_to_device(batch, device)
    if isinstance(batch, dict):
        return {name: _on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_on_device(value, device) for value in batch)
    return batch


@contextlib.contextmanager
def document_ids_copied_without_waiting(device: torch.device) -> Iterator[None]:
    """Copy the documents' ids, from which a packed batch's mask is made, without waiting for the GPU.

    torchtune 0.6.1 (modules/attention_utils.py, packed_block_causal_mask) copies them from pageable memory,
    which waits for all that the GPU has still to do.
    """
    document_ids = attention_utils._get_document_ids_from_seq_lens

    def on_device(seq_lens: list[torch.Tensor]) -> torch.Tensor:
        return copy_to_device(document_ids(seq_lens), device)

    attention_utils._get_document_ids_from_seq_lens = on_device
    try:
        yield
    finally:
        attention_utils._get_document_ids_from_seq_lens = document_ids
