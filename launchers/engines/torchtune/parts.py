"""Components that the torchtune YAML names: tokenized data, a schedule, and a logger without output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from launchers.dataset.prepared import IGNORE, Prepared
from launchers.engines._schedule import lr_factor
from launchers.settings.sections import Schedule


class PadOnly:
    """Tokenizer for rows that are already tokenized: it only defines the padding token."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id


class PreparedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a prepared folder in training order, from ``start_step`` on.

    The recipes' sampler gives rank r of W the items r, r + W, ... Step s of any world size therefore trains
    on exactly ``order[s * global_batch_size : (s + 1) * global_batch_size]``.

    Counts the samples and tokens that this rank has loaded, without padding: the recipes load in the training
    process, without workers.
    """

    def __init__(
        self, tokenizer: PadOnly, *, folder: str, start_step: int, total_steps: int, packed: bool
    ) -> None:
        self._data = Prepared(Path(folder))
        info = self._data.info
        self._rows = self._data.order[
            start_step * info.global_batch_size : total_steps * info.global_batch_size
        ]
        self._pad_id = tokenizer.pad_id
        self._packed = packed
        self._samples = self._tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._data.row(int(self._rows[index]))
        self._samples += 1
        self._tokens += len(row.tokens)
        tokens, labels = row.tokens.astype(np.int64), row.labels.astype(np.int64)
        if not self._packed:
            return {"tokens": tokens, "labels": labels}
        return self._pack(tokens, labels, row.positions.astype(np.int64), row.lengths.astype(np.int64))

    def _pack(self, tokens: Any, labels: Any, positions: Any, lengths: Any) -> dict[str, Any]:
        """Pad to tensors of one length, as torchtune's collate requires; padding is a separate document."""
        missing = self._data.info.seq_len - len(tokens)
        if missing:
            tokens = np.pad(tokens, (0, missing), constant_values=self._pad_id)
            labels = np.pad(labels, (0, missing), constant_values=IGNORE)
            positions = np.concatenate([positions, np.arange(missing)])
            lengths = np.append(lengths, missing)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "input_pos": torch.from_numpy(positions),
            "seq_lens": torch.from_numpy(lengths),
        }

    def take_counts(self) -> tuple[int, int]:
        """Return the samples and tokens handed out since the last call."""
        counts = self._samples, self._tokens
        self._samples = self._tokens = 0
        return counts


class PreparedPairs(PreparedDataset):
    """Prepared pairs, by the names that the DPO recipes use."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._data.row(int(self._rows[index]))
        self._samples += 1
        self._tokens += len(row.tokens)
        pair: dict[str, Any] = {}
        for name, answer in zip(("chosen", "rejected"), row.documents(), strict=True):
            pair[f"{name}_input_ids"] = answer.tokens.astype(np.int64)
            pair[f"{name}_labels"] = answer.labels.astype(np.int64)
        return pair


def schedule(
    optimizer: torch.optim.Optimizer,
    *,
    num_training_steps: int,
    last_epoch: int = -1,
    **settings: Any,
) -> LambdaLR:
    """Build the schedule that all engines use. ``settings``: section `schedule` of the run's settings."""
    return LambdaLR(optimizer, lr_factor(Schedule(**settings), num_training_steps), last_epoch)


class NoLogger:
    """A metric logger without output: the telemetry of launchers.gang.rank replaces it."""

    def log_config(self, config: Any) -> None: ...

    def log(self, name: str, data: Any, step: int) -> None: ...

    def log_dict(self, payload: Any, step: int) -> None: ...

    def close(self) -> None: ...
