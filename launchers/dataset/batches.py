"""Prepared rows as a rank's micro batches, and the loss over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from estimator.plan import Layout
from launchers.dataset.prepared import IGNORE, Prepared, Row

# Positions whose logits are held in fp32 at once: half a GiB for a vocabulary of 128k.
LOSS_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """[sequences, longest row] each. ``labels[i]`` is what the model should say after ``input_ids[i]``."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor  # [sequences], without padding
    packed: bool = False  # whether a row holds several documents
    desirable: torch.Tensor | None = None  # [sequences] bool, of judged answers
    reference: torch.Tensor | None = None  # [rows, answers]: launchers.reference's, of these rows

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model is called with. Not every model takes positions, and one document needs none."""
        positions = {"position_ids": self.position_ids} if self.packed else {}
        return {"input_ids": self.input_ids, **positions}

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            labels=self.labels.to(device),
            lengths=self.lengths,
            packed=self.packed,
            desirable=None if self.desirable is None else self.desirable.to(device),
            reference=None if self.reference is None else self.reference.to(device),
        )


def step_rows(data: Prepared, step: int, global_batch_size: int) -> NDArray[np.int32]:
    """Indices of the rows of a step; 0 is the first."""
    return data.order[step * global_batch_size : (step + 1) * global_batch_size]


def counted_labels(data: Prepared, step: int, global_batch_size: int) -> int:
    """Labels of the whole global batch that count in the loss, over all ranks."""
    rows = step_rows(data, step, global_batch_size)
    return sum(int((data.row(index).labels != IGNORE).sum()) for index in rows)


def micro_batches(
    data: Prepared,
    layout: Layout,
    step: int,
    rank: int,
    *,
    pairs: bool = False,
    reference: NDArray[np.float32] | None = None,
) -> Iterator[MicroBatch]:
    """A rank's micro batches of a step: of each ``world_size`` rows in order it takes the rank-th.

    ``pairs``: rows are pairs (:func:`collate_pairs`). ``reference``: launchers.reference's of all rows; the
    batches carry their own.
    """
    put_together = collate_pairs if pairs else collate
    mine = step_rows(data, step, layout.global_batch_size)[rank :: layout.data_parallel]
    for first in range(0, len(mine), layout.micro_batch_size):
        some = mine[first : first + layout.micro_batch_size]
        batch = put_together([data.row(index) for index in some], data.info.pad_id)
        known = None if reference is None else torch.from_numpy(reference[some])
        yield batch if known is None else dataclasses.replace(batch, reference=known)


def mismatched_batches(
    data: Prepared, layout: Layout, step: int, rank: int, reference: NDArray[np.float32] | None = None
) -> Iterator[MicroBatch]:
    """Like :func:`micro_batches`, of each prompt with the answer to another one (:func:`mismatched_rows`)."""
    mine = mismatched_rows(data, step)[rank :: layout.data_parallel]
    known = None
    if reference is not None:
        first = len(data) + step * layout.global_batch_size
        known = reference[first : first + layout.global_batch_size][rank :: layout.data_parallel]
    for first in range(0, len(mine), layout.micro_batch_size):
        part = slice(first, first + layout.micro_batch_size)
        batch = collate(mine[part], data.info.pad_id)
        yield batch if known is None else dataclasses.replace(batch, reference=torch.from_numpy(known[part]))


def collate(rows: list[Row], pad_id: int) -> MicroBatch:
    """Pad rows on the right to the longest of them.

    No attention mask is needed: what comes before a token decides what it sees, padding comes after,
    and transformers reads the borders of packed documents from positions that begin anew.
    """
    width = max(len(row.tokens) for row in rows)
    shape = (len(rows), width)
    tokens = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    positions = np.empty(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens[index, :length] = row.tokens
        labels[index, : length - 1] = row.labels[1:]
        positions[index, :length] = row.positions
        # after one document the count goes on, so that no border (and no mask) appears
        positions[index, length:] = np.arange(width - length) + (length if len(row.lengths) == 1 else 0)
    return MicroBatch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions),
        labels=torch.from_numpy(labels),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        packed=any(len(row.lengths) > 1 for row in rows),
        desirable=torch.tensor([row.desirable for row in rows]),
    )


def mismatched_rows(data: Prepared, step: int) -> list[Row]:
    """Each prompt of a step with the answer of the row before it (the first one's with the last row's).

    What counts is the answer, cut at the data's ``seq_len``: KTO's estimate of how far the model has moved.
    """
    rows = [data.row(index) for index in step_rows(data, step, data.info.global_batch_size)]
    seq_len, found = data.info.seq_len, []
    for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        prompt, answer = row.tokens[: _answer_start(row)], other.tokens[_answer_start(other) :]
        tokens = np.concatenate([prompt, answer])[:seq_len]
        labels = np.concatenate([np.full(len(prompt), IGNORE, dtype=np.int32), answer])[:seq_len]
        found.append(Row(tokens=tokens, labels=labels, lengths=np.array([len(tokens)], dtype=np.int32)))
    return found


def _answer_start(row: Row) -> int:
    return int(np.argmax(row.labels != IGNORE))


def collate_pairs(rows: list[Row], pad_id: int) -> MicroBatch:
    """Pairs as one batch of twice as many sequences: all chosen conversations, then all rejected ones."""
    chosen, rejected = zip(*(row.documents() for row in rows), strict=True)
    return collate([*chosen, *rejected], pad_id)


def summed_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[sequences]: the sum of the log-probabilities of each one's labels that count, in fp32.

    Chunk by chunk, as :func:`summed_cross_entropy`.
    """
    per_token = [
        checkpoint(_chunk_log_probabilities, chunk, wanted, use_reentrant=False, preserve_rng_state=False)
        for chunk, wanted in zip(
            torch.split(logits.flatten(0, -2), LOSS_CHUNK),
            torch.split(labels.flatten(), LOSS_CHUNK),
            strict=True,
        )
    ]
    return torch.cat(per_token).view(labels.shape).sum(-1)


def _chunk_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all labels that count, in fp32.

    The fp32 copy of the logits is made for a few positions at a time and again in the backward pass.
    """
    flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
    total = torch.zeros((), device=logits.device)
    for chunk, wanted in zip(
        torch.split(flat_logits, LOSS_CHUNK), torch.split(flat_labels, LOSS_CHUNK), strict=True
    ):
        total = total + checkpoint(_chunk_loss, chunk, wanted, use_reentrant=False, preserve_rng_state=False)
    return total


def _chunk_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
