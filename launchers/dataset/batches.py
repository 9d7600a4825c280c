"""Micro batches of a rank from prepared rows, and the cross entropy over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from estimator.plan import Layout
from launchers.dataset.prepared import IGNORE, Prepared, Row

# Number of positions whose logits are converted to fp32 at a time: 0.5 GiB for a vocabulary of 128k
LOSS_CHUNK = 1024
# The length of a padding-free batch is filled up to a multiple of this. Matrix products in float8 need 16,
# tensor cores 64
TOKEN_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Token tensors of one forward pass; ``labels[i]`` is the token that follows ``input_ids[i]``.

    Token tensors have the shape [sequences, longest row]. In a padding-free batch they are [1, tokens]: all
    sequences are concatenated, and ``cu_seq_lens`` contains the boundaries of the documents.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor  # [sequences], without padding; on the CPU
    packed: bool = False  # whether a row contains several documents
    cu_seq_lens: torch.Tensor | None = None  # int32 [documents + 1], cumulative lengths from 0
    max_length: int = 0  # upper bound of a document's tokens, a power of two
    desirable: torch.Tensor | None = None  # [sequences] bool, for judged answers
    reference: torch.Tensor | None = None  # [rows, answers], from launchers.evaluation.reference
    vision: Mapping[str, Any] = field(default_factory=dict)  # further inputs of a vision-language model

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths.sum())

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model; positions only for packed rows, as not every model accepts them."""
        if self.cu_seq_lens is not None:
            return {
                "input_ids": self.input_ids,
                "position_ids": self.position_ids,
                "cu_seq_lens_q": self.cu_seq_lens,
                "cu_seq_lens_k": self.cu_seq_lens,
                "max_length_q": self.max_length,
                "max_length_k": self.max_length,
            }
        positions = {"position_ids": self.position_ids} if self.packed else {}
        return {"input_ids": self.input_ids, **positions, **self.vision}

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values``, one per token, over each sequence: [sequences]."""
        if self.cu_seq_lens is None:
            return values.sum(-1)
        return torch.stack(
            [part.sum() for part in torch.split(values[0, : self.tokens], self.lengths.tolist())]
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to ``device``; to a GPU from page-locked memory, without waiting for the copy."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "lengths"}
        changed: dict[str, Any] = {
            name: copy_to_device(value, device)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        changed["vision"] = {name: copy_to_device(value, device) for name, value in self.vision.items()}
        return dataclasses.replace(self, **changed)


class ImageInputs(Protocol):
    """Builder of a vision-language model's inputs (launchers.dataset.vision_tokenizer.VisionTokenizer)."""

    def inputs(self, images: Sequence[Sequence[Any]], input_ids: torch.Tensor) -> dict[str, Any]:
        """Build the model's other inputs from the images of each row and the token ids of all rows."""
        ...


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to ``device``; to a GPU from page-locked memory, without waiting for the copy."""
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


def step_rows(data: Prepared, step: int, global_batch_size: int) -> NDArray[np.int32]:
    """Return the row indices of a step's global batch; the first step is 0."""
    return data.order[step * global_batch_size : (step + 1) * global_batch_size]


def count_labels(data: Prepared, step: int, global_batch_size: int) -> int:
    """Count the tokens of a step's global batch that count in the loss, over all ranks."""
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
    padding_free: bool = False,
    images: ImageInputs | None = None,
) -> Iterator[MicroBatch]:
    """Iterate over a rank's micro batches of a step: rows rank, rank + world size, ... of the step.

    Parameters
    ----------
    pairs:
        Whether rows are pairs (:func:`collate_pairs`).
    reference:
        Log-probabilities of all rows from launchers.evaluation.reference; each batch gets those of its rows.
    padding_free:
        Whether to concatenate the rows instead of padding them (:class:`MicroBatch`).
    images:
        Builder of a vision-language model's inputs.
    """
    collate_rows = collate_pairs if pairs else partial(collate, images=images)
    multiple = token_multiple(data, padding_free=padding_free, rows=layout.micro_batch_size)
    rank_rows = step_rows(data, step, layout.global_batch_size)[rank :: layout.data_parallel]
    for first in range(0, len(rank_rows), layout.micro_batch_size):
        batch_rows = rank_rows[first : first + layout.micro_batch_size]
        batch = collate_rows([data.row(index) for index in batch_rows], data.info.pad_id, multiple)
        if multiple is not None and data.info.packed:
            batch = dataclasses.replace(
                batch, max_length=max(batch.max_length, _power_of_two(data.info.seq_len))
            )
        batch_reference = None if reference is None else torch.from_numpy(reference[batch_rows])
        yield dataclasses.replace(batch, reference=batch_reference)


def token_multiple(data: Prepared, *, padding_free: bool, rows: int = 1) -> int | None:
    """Return the multiple to which :func:`collate` fills padding-free batches; None for padded batches.

    Batches of ``rows`` packed rows are filled up to full sequences, so that compiled blocks have one shape.
    """
    if not padding_free:
        return None
    return data.info.seq_len * rows if data.info.packed else TOKEN_MULTIPLE


def _power_of_two(length: int) -> int:
    """Return the smallest power of two that is at least ``length``."""
    return 1 << (length - 1).bit_length()


def mismatched_batches(
    data: Prepared,
    layout: Layout,
    step: int,
    rank: int,
    reference: NDArray[np.float32] | None = None,
    *,
    padding_free: bool = False,
) -> Iterator[MicroBatch]:
    """Iterate over a rank's micro batches of :func:`mismatched_rows`.

    ``reference``: log-probabilities from launchers.evaluation.reference, where those of the mismatched rows
    follow those of all rows.
    """
    rank_rows = mismatched_rows(data, step)[rank :: layout.data_parallel]
    rank_reference = None
    if reference is not None:
        first = len(data) + step * layout.global_batch_size
        rank_reference = reference[first : first + layout.global_batch_size][rank :: layout.data_parallel]
    multiple = token_multiple(data, padding_free=padding_free)
    for first in range(0, len(rank_rows), layout.micro_batch_size):
        part = slice(first, first + layout.micro_batch_size)
        batch = collate(rank_rows[part], data.info.pad_id, multiple)
        batch_reference = None if rank_reference is None else torch.from_numpy(rank_reference[part])
        yield dataclasses.replace(batch, reference=batch_reference)


def collate(
    rows: list[Row], pad_id: int, multiple: int | None = None, images: ImageInputs | None = None
) -> MicroBatch:
    """Pad rows on the right to the longest of them, or concatenate them without padding.

    No attention mask is needed: attention is causal, padding is at the end, and transformers derives the
    boundaries of packed documents from positions that restart at 0.

    ``multiple``: concatenate the rows to one sequence, filled up to a multiple of this length (a padding-free
    batch). ``images``: builder of a vision-language model's inputs, whose batches are padded.
    """
    if multiple is not None:
        return _concatenate(rows, pad_id, multiple)
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
        # positions continue in the padding of a single document: without a boundary, no mask is needed
        positions[index, length:] = np.arange(width - length) + (length if len(row.lengths) == 1 else 0)
    input_ids = torch.from_numpy(tokens)
    return MicroBatch(
        input_ids=input_ids,
        vision={} if images is None else images.inputs([row.images for row in rows], input_ids),
        position_ids=torch.from_numpy(positions),
        labels=torch.from_numpy(labels),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        packed=any(len(row.lengths) > 1 for row in rows),
        desirable=torch.tensor([row.desirable for row in rows]),
    )


def _concatenate(rows: list[Row], pad_id: int, multiple: int) -> MicroBatch:
    """Concatenate all rows; a document of padding fills the sequence up to a multiple of ``multiple``."""
    lengths = np.concatenate([row.lengths for row in rows])
    count = int(lengths.sum())
    total = -(-count // multiple) * multiple
    documents = np.append(lengths, total - count) if total > count else lengths
    tokens = np.full((1, total), pad_id, dtype=np.int64)
    labels = np.full((1, total), IGNORE, dtype=np.int64)
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in documents])
    tokens[0, :count] = np.concatenate([row.tokens for row in rows])
    # The first label of each document is IGNORE (prepared.py), so that none crosses a boundary
    labels[0, : count - 1] = np.concatenate([row.labels for row in rows])[1:]
    return MicroBatch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions)[None],
        labels=torch.from_numpy(labels),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        packed=any(len(row.lengths) > 1 for row in rows),
        cu_seq_lens=torch.from_numpy(np.concatenate([[0], np.cumsum(documents)]).astype(np.int32)),
        max_length=_power_of_two(int(documents.max())),
        desirable=torch.tensor([row.desirable for row in rows]),
    )


def mismatched_rows(data: Prepared, step: int) -> list[Row]:
    """Combine each prompt of a step with the answer of the previous row; the first with the last row's.

    Only the answer counts in the loss; rows are truncated at the data's ``seq_len``. KTO estimates its
    divergence from the reference model on these rows.
    """
    rows = [data.row(index) for index in step_rows(data, step, data.info.global_batch_size)]
    seq_len, mismatched = data.info.seq_len, []
    for row, neighbor in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        prompt, answer = row.tokens[: _answer_start(row)], neighbor.tokens[_answer_start(neighbor) :]
        tokens = np.concatenate([prompt, answer])[:seq_len]
        labels = np.concatenate([np.full(len(prompt), IGNORE, dtype=np.int32), answer])[:seq_len]
        mismatched.append(Row(tokens=tokens, labels=labels, lengths=np.array([len(tokens)], dtype=np.int32)))
    return mismatched


def _answer_start(row: Row) -> int:
    return int(np.argmax(row.labels != IGNORE))


def collate_pairs(rows: list[Row], pad_id: int, multiple: int | None = None) -> MicroBatch:
    """Collate pairs to a batch of all chosen conversations, followed by all rejected ones."""
    chosen, rejected = zip(*(row.documents() for row in rows), strict=True)
    return collate([*chosen, *rejected], pad_id, multiple)


def summed_log_probabilities(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum the log-probabilities of the labels over each sequence: [sequences], fp32."""
    return batch.sum_by_sequence(log_probabilities(logits, batch.labels))


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute log-probabilities of ``labels``: [sequences, positions], fp32; 0 where they do not count."""
    return -torch.cat(list(_cross_entropies(logits, labels, "none"))).view(labels.shape)


def chunk_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the log-probability of each label, [positions], of all positions at once."""
    return -cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross entropies of all labels, in fp32."""
    return sum(_cross_entropies(logits, labels, "sum"), torch.zeros((), device=logits.device))


def _cross_entropies(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> Iterator[torch.Tensor]:
    """Iterate over the cross entropies of chunks of :data:`LOSS_CHUNK` positions.

    Logits are converted to fp32 by chunk, and converted again in the backward pass, to save memory.
    """

    def of_chunk(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction=reduction)

    chunks = torch.split(logits.flatten(0, -2), LOSS_CHUNK), torch.split(labels.flatten(), LOSS_CHUNK)
    for chunk, chunk_labels in zip(*chunks, strict=True):
        yield checkpoint(of_chunk, chunk, chunk_labels, use_reentrant=False, preserve_rng_state=False)
