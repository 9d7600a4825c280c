"""Tokenization of rows in several processes: each tokenizes every n-th chunk and writes it to a file.

``python -m launchers.dataset.tokenization request.json`` runs such a process. Small datasets are tokenized in
the calling process, because starting others would take longer. The order of the rows does not depend on the
number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import UserError
from estimator.vocabulary import TASKS
from launchers.base.request_process import read_request, write_request
from launchers.cluster.processes import PARENT, die_with_parent, started, tail
from launchers.dataset import prompts, render, texts
from launchers.dataset.documents import Chunk, Documents
from launchers.dataset.preferences import Judged, Pair, Sample, conversation_of
from launchers.dataset.progress import Progress
from launchers.dataset.rows import Conversation
from launchers.dataset.stored import Selected, StoredRows, decode, encode
from launchers.settings import Settings

CHUNK_ROWS = 512
CHUNK_BYTES = 1 << 20  # of stored rows
# Datasets below both sizes are tokenized faster than another process imports transformers (about 5 s)
SINGLE_PROCESS_BYTES = 12 << 20
SINGLE_PROCESS_ROWS = 32_768  # the same time: benchmarks.prepare_rows has 370 bytes a row
MAX_PROCESSES = 16  # each uses 0.3 GiB of memory
_POLL_S = 0.05
_INDICES = "indices.npy"


def tokenize(
    rows: Sequence[Sample], model_dir: Path, tokenizer: Any, settings: Settings, seq_len: int, folder: Path
) -> Documents:
    """Tokenize rows to documents in ``folder``, truncated (or split) at ``seq_len`` tokens.

    ``tokenizer``: tokenizer of ``model_dir``, for rows that are tokenized in this process. ``folder`` is
    emptied first. Raises UserError for rows that cannot be rendered.
    """
    shutil.rmtree(folder, ignore_errors=True)
    documents = Documents(folder, 2 if settings.trains_on_pairs else 1)
    progress = Progress("tokenizing", len(rows))
    stored = _RowsOnDisk.of(rows)
    boundaries = _chunk_boundaries(np.zeros(len(rows)) if stored is None else stored.sizes)
    processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(boundaries) - 1)
    try:
        if stored is None or stored.is_small or processes < 2:
            for first, last in itertools.pairwise(boundaries):
                documents.add(make_chunk(rows[first:last], tokenizer, settings, seq_len))
                progress.at(last)
        else:
            request = _Request(
                rows=stored.rows.folder,
                replacements={index: encode(row).decode() for index, row in stored.replacements.items()},
                boundaries=boundaries,
                model_dir=model_dir,
                settings=settings,
                seq_len=seq_len,
                folder=folder,
                processes=processes,
            )
            np.save(folder / _INDICES, stored.indices)
            longest = np.inf if settings.task == "pretrain" else render.LONG_TEXT_CHARS
            done_bytes = np.concatenate([[0], np.cumsum(np.minimum(stored.sizes, longest))])
            for chunk in _tokenize_in_processes(
                request, lambda row: progress.at(row, lambda: float(done_bytes[row] / done_bytes[-1]))
            ):
                documents.add(chunk)
        documents.finish()
    except BaseException:
        documents.close()
        raise
    return documents


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowsOnDisk:
    """Selection of rows in files that other processes can read."""

    rows: StoredRows
    indices: NDArray[np.integer]
    replacements: Mapping[int, Sample]

    @classmethod
    def of(cls, rows: Sequence[Sample]) -> _RowsOnDisk | None:
        """Describe ``rows`` by the files they are in; None if they are in memory."""
        if isinstance(rows, StoredRows):
            return cls(rows=rows, indices=np.arange(len(rows)), replacements={})
        if isinstance(rows, Selected) and isinstance(rows.rows, StoredRows):
            return cls(rows=rows.rows, indices=rows.indices, replacements=rows.replacements)
        return None

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Size of each row in bytes: [rows]."""
        sizes: NDArray[np.int64] = np.diff(self.rows.offsets)[self.indices]
        return sizes

    @property
    def is_small(self) -> bool:
        """Whether one process tokenizes the rows faster than several, which have to start."""
        return len(self.indices) < SINGLE_PROCESS_ROWS and int(self.sizes.sum()) < SINGLE_PROCESS_BYTES


def _chunk_boundaries(sizes: NDArray[np.number]) -> list[int]:
    """Divide rows of these sizes (bytes) into chunks of at most CHUNK_ROWS rows and CHUNK_BYTES.

    Returns the row indices at which chunks begin, followed by the number of rows.
    """
    boundaries, first, chunk_bytes = [0], 0, 0
    for index, size in enumerate(sizes.tolist()):
        if index > first and (index - first == CHUNK_ROWS or chunk_bytes + size > CHUNK_BYTES):
            boundaries.append(index)
            first, chunk_bytes = index, 0
        chunk_bytes += size
    return [*boundaries, len(sizes)] if len(sizes) else [0]


def make_chunk(rows: Sequence[Sample], tokenizer: Any, settings: Settings, seq_len: int) -> Chunk:
    """Tokenize rows to documents in this process."""
    if TASKS[settings.task].draws_answers:
        return _chunk_of_prompts(rows, tokenizer, seq_len)
    samples = list(rows)
    splits = settings.task == "pretrain"
    limit = None if splits else render.TextLimit(tokens=seq_len)
    tokens: list[NDArray[np.int32]] = []
    counted: list[NDArray[np.bool_]] = []
    full_lengths: list[int] = []
    desirable: list[bool] = []
    images: list[tuple[bytes, ...]] = []
    truncated = dropped = split = piece_count = 0
    for sample, (documents, desirable_row) in zip(
        samples, _tokenized_rows(samples, tokenizer, settings, limit), strict=True
    ):
        exceeds = any(len(ids) > seq_len for ids, _ in documents)
        truncated += exceeds and not splits
        attached = sample.images if isinstance(sample, Conversation) else ()
        if exceeds and attached:
            _check_images_fit(sample, documents[0][0], tokenizer, seq_len)
        if splits:
            kept_documents = [
                [piece] for document in documents for piece in _split_document(*document, seq_len)
            ]
        else:
            kept_documents = [[(ids[:seq_len], counts[:seq_len]) for ids, counts in documents]]
        kept_documents = [
            row_documents
            for row_documents in kept_documents
            if all(counts.any() for _, counts in row_documents)
        ]
        if not kept_documents:
            dropped += 1
            continue
        if exceeds and splits:
            split += 1
            piece_count += len(kept_documents)
        for row_documents in kept_documents:
            tokens += [ids for ids, _ in row_documents]
            counted += [counts for _, counts in row_documents]
            desirable.append(desirable_row)
            images += [attached] * len(row_documents)
        full_lengths += [len(ids) for ids, _ in documents]
    return Chunk(
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *tokens]),
        counted=np.concatenate([np.zeros(0, dtype=np.bool_), *counted]),
        lengths=np.array([len(ids) for ids in tokens], dtype=np.int32),
        desirable=np.array(desirable, dtype=np.bool_),
        full_lengths=np.array(full_lengths, dtype=np.int32),
        **_image_arrays(images),
        rows=len(samples),
        truncated=truncated,
        cut=0 if limit is None else limit.cut,
        dropped=dropped,
        split=split,
        pieces=piece_count,
    )


def _check_images_fit(row: Sample, tokens: NDArray[np.int32], tokenizer: Any, seq_len: int) -> None:
    """Raise UserError for a row whose images would be cut at ``seq_len`` tokens."""
    indices = np.flatnonzero(np.isin(tokens, tokenizer.image_ids))
    if len(indices) and indices[-1] >= seq_len:
        raise UserError(
            f"Dataset, line {row.line}: its images end at token {indices[-1] + 1:,}, and seq_len is "
            f"{seq_len:,}; an image cannot be cut.",
            f"Use --seq-len {len(tokens)}, or scale the images down.",
        )


def _image_arrays(images: Sequence[tuple[bytes, ...]]) -> dict[str, Any]:
    """Return the images of each document as the arrays of a :class:`Chunk`."""
    if not any(images):
        return {}
    files = list(itertools.chain.from_iterable(images))
    return {
        "images": np.frombuffer(b"".join(files), dtype=np.uint8),
        "image_sizes": np.array([len(file) for file in files], dtype=np.int64),
        "image_counts": np.array([len(row_images) for row_images in images], dtype=np.int32),
    }


def _chunk_of_prompts(rows: Sequence[Sample], tokenizer: Any, seq_len: int) -> Chunk:
    """Tokenize rows to prompts; long prompts are truncated at the start, as the question is at the end."""
    tokenized = [ids for _, ids in prompts.tokenized(map(conversation_of, rows), tokenizer)]
    truncated = [ids[-seq_len:] for ids in tokenized]
    tokens = np.fromiter(itertools.chain.from_iterable(truncated), dtype=np.int32)
    return Chunk(
        tokens=tokens,
        counted=np.zeros(len(tokens), dtype=np.bool_),
        lengths=np.array([len(ids) for ids in truncated], dtype=np.int32),
        desirable=np.ones(len(truncated), dtype=np.bool_),
        full_lengths=np.array([len(ids) for ids in tokenized], dtype=np.int32),
        rows=len(rows),
        truncated=sum(len(ids) > seq_len for ids in tokenized),
    )


def _tokenized_rows(
    samples: Sequence[Sample], tokenizer: Any, settings: Settings, limit: render.TextLimit | None
) -> Iterator[tuple[list[render.Tokens], bool]]:
    """Iterate over the tokenized documents of each row, and whether its answer is judged good."""
    pairs = settings.trains_on_pairs
    conversations: list[Conversation] = []
    for sample in samples:
        if isinstance(sample, Pair):
            conversations += (sample.chosen, sample.rejected)
        else:
            conversations.append(conversation_of(sample))
    single = pairs or TASKS[settings.task].judged  # the loss covers one answer per conversation
    prompt_counts = settings.train_on_prompt and not single
    documents = render.tokenize(
        conversations, tokenizer, train_on_prompt=prompt_counts, last_turn_only=single, limit=limit
    )
    for sample in samples:
        desirable = sample.desirable if isinstance(sample, Judged) else True
        yield [next(documents) for _ in range(2 if pairs else 1)], desirable


def _split_document(
    tokens: NDArray[np.int32], counted: NDArray[np.bool_], seq_len: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Split a document into consecutive pieces of ``seq_len`` tokens; the last may be shorter.

    Only the last piece contains the end-of-sequence token. The first token of a piece does not count in the
    loss, because its context is in another row.
    """
    first = 0
    for length in texts.piece_lengths(len(tokens), seq_len):
        counts = counted[first : first + length].copy()
        counts[0] = False
        yield tokens[first : first + length], counts
        first += length


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Input of a tokenizing process. ``folder`` contains the indices of the rows, and receives the chunks."""

    rows: Path  # folder of StoredRows
    replacements: dict[int, str]  # by index: encoded row to use instead of the stored one
    boundaries: list[int]
    model_dir: Path
    settings: Settings
    seq_len: int
    folder: Path
    process: int = 0  # first chunk of this process, which tokenizes every ``processes``-th
    processes: int

    def chunk_file(self, number: int) -> Path:
        """Return the path of a chunk. With suffix .json, it is the path of the error if the chunk failed."""
        return self.folder / f"chunk-{number:06d}.npz"


def _tokenize_in_processes(request: _Request, report: Callable[[int], None]) -> Iterator[Chunk]:
    """Start the tokenizing processes, and iterate over their chunks in order.

    ``report`` receives the number of rows that are done.
    """
    count, limit_s = len(request.boundaries) - 1, request.settings.resources.hang_timeout_s
    with contextlib.ExitStack() as running:
        workers = [
            running.enter_context(
                started(
                    "launchers.dataset.tokenization",
                    write_request(
                        request.folder / f"request-{number}.json",
                        dataclasses.replace(request, process=number),
                    ),
                    request.folder / f"{number}.log",
                    on_cpu=True,
                )
            )
            for number in range(request.processes)
        ]
        for number in range(count):
            path, waiting_since = request.chunk_file(number), time.monotonic()
            worker = workers[number % request.processes]
            while not path.is_file():
                exited = worker.poll() is not None
                if path.is_file():
                    break
                if path.with_suffix(".json").is_file():
                    raise UserError(**json.loads(path.with_suffix(".json").read_text()))
                if exited:
                    raise _worker_error(worker, request.folder / f"{number % request.processes}.log")
                if time.monotonic() - waiting_since > limit_s:
                    raise UserError(
                        f"Rows {request.boundaries[number] + 1:,} to {request.boundaries[number + 1]:,} were "
                        f"not tokenized within {limit_s:g} s.",
                        "Raise resources.hang_timeout_s if this machine is that slow.",
                    )
                report(request.boundaries[number])
                time.sleep(_POLL_S)
            yield Chunk.load(path)
            path.unlink()
            report(request.boundaries[number + 1])


def _worker_error(worker: subprocess.Popen[bytes], log: Path) -> UserError:
    """Build the error for a tokenizing process that ended early, with the end of its log."""
    status = worker.returncode
    outcome = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed (status {status})"
    advice = "The usual cause of a killed process is insufficient memory."
    return UserError(f"A process that tokenizes {outcome}. {tail(log, 1)}".strip(), tail(log, 30) or advice)


def main(path: Path) -> None:
    """Entry point of a tokenizing process: write its chunks, or the error of the first invalid one."""
    request = read_request(_Request, path)
    render.leave_out_torch(request.settings)
    tokenizer = render.load_tokenizer(request.model_dir, request.settings)
    replacements = {index: decode(row.encode()) for index, row in request.replacements.items()}
    indices = np.load(request.folder / _INDICES, mmap_mode="r")
    base = StoredRows(request.rows)
    for number in range(request.process, len(request.boundaries) - 1, request.processes):
        chunk_indices = indices[request.boundaries[number] : request.boundaries[number + 1]]
        rows = [
            replacements[index] if index in replacements else base[index] for index in chunk_indices.tolist()
        ]
        target = request.chunk_file(number)
        try:
            chunk = make_chunk(rows, tokenizer, request.settings, request.seq_len)
        except UserError as error:
            message = json.dumps({"problem": error.problem, "advice": error.advice})
            target.with_suffix(".part").write_text(message)
            target.with_suffix(".part").rename(target.with_suffix(".json"))
            return
        chunk.save(target)


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    main(Path(sys.argv[1]))
