"""Preparation of training data: hold rows out, tokenize, truncate or split, pack, order, write files."""

from __future__ import annotations

import base64
import bisect
import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import UserError
from estimator.terminal import print
from estimator.vocabulary import TASKS
from launchers.dataset import prepared, prompts, render, texts
from launchers.dataset.asking import PromptFormat
from launchers.dataset.documents import Documents, Packing
from launchers.dataset.order import grouped_by_length, longest_first
from launchers.dataset.preferences import Sample, conversation_of
from launchers.dataset.prepared import IGNORE, Prepared, PreparedInfo
from launchers.dataset.progress import Progress
from launchers.dataset.seeding import random_stream
from launchers.dataset.stored import Selected, characters_of, concatenate, sources_of
from launchers.dataset.tokenization import tokenize
from launchers.settings import Settings

MAX_HELD_OUT = 256
INSPECTED_ROWS = 1000  # rows inspected to decide whether a dataset consists of chats
_SHOWN_CHARS = 1500  # maximum length of a masked or unmasked section of the sample row
# Characters per token in English: help.openai.com, "What are tokens and how to count them?"
_CHARACTERS_PER_TOKEN = 4


def split(samples: Sequence[Sample], settings: Settings) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Split off held-out rows at random; return training rows in file order, and held-out rows.

    Holds out ``evaluation.fraction`` of the rows, at least 1 and at most 256; none if the fraction is 0, or
    if there is a separate held-out dataset. For plain text (task pretrain), it is the fraction of each
    dataset's characters. Depends only on the seed.
    """
    if settings.evaluation.fraction == 0 or settings.evaluation.dataset is not None:
        return samples, []
    if settings.task == "pretrain":
        return _split_text(samples, settings)
    held_out = held_out_rows(len(samples), settings)
    train = np.delete(np.arange(len(samples)), held_out)
    return Selected(samples, train), Selected(samples, np.array(held_out, dtype=np.int64))


def held_out_rows(count: int, settings: Settings) -> list[int]:
    """Return the indices of the rows that :func:`split` holds out, for tasks other than pretrain."""
    if settings.evaluation.fraction == 0 or settings.evaluation.dataset is not None or count < 2:
        return []
    held_out_count = min(max(1, round(settings.evaluation.fraction * count)), MAX_HELD_OUT, count - 1)
    indices: list[int] = random_stream(settings.seed, "split").permutation(count)[:held_out_count].tolist()
    return indices


def _split_text(rows: Sequence[Sample], settings: Settings) -> tuple[Selected, Selected]:
    """Split plain text by characters instead of documents, whose lengths differ widely.

    A fraction of the documents might contain nearly all of the text, or almost none. Per dataset, at most as
    much text is held out as is evaluated: 256 sequences.
    """
    train: list[Selected] = []
    held_out: list[Selected] = []
    sources = sources_of(rows)
    for source in np.unique(sources).tolist():
        documents = Selected(rows, np.flatnonzero(sources == source))
        characters = round(settings.evaluation.fraction * int(characters_of(documents).sum()))
        if settings.seq_len is not None:
            characters = min(characters, MAX_HELD_OUT * settings.seq_len * _CHARACTERS_PER_TOKEN)
        order = random_stream(settings.seed, "split", source).permutation(len(documents)).tolist()
        training_documents, held_out_documents = texts.hold_out(documents, characters, order, MAX_HELD_OUT)
        train.append(training_documents)
        held_out.append(held_out_documents)
    return concatenate(train), concatenate(held_out)


def check_batch(rows: int, name: str, settings: Settings) -> None:
    """Raise UserError if there are fewer rows than one batch. ``name``: what the message calls the rows."""
    if TASKS[settings.task].draws_answers and rows < settings.rows_per_step:
        raise UserError(
            f"A step of global_batch_size {settings.batch_size} answers, rl.group_size "
            f"{settings.rl.group_size} to each prompt, takes {settings.rows_per_step} prompts, but there are "
            f"only {rows:,}.",
            f"Use --global-batch-size {rows * settings.rl.group_size} or less, or more data.",
        )
    if rows < settings.rows_per_step:
        raise UserError(
            f"global_batch_size {settings.batch_size} is more than the {rows:,} {name}.",
            f"Use --global-batch-size {rows} or less, or more data.",
        )


def prepare(
    train: Sequence[Sample],
    model_dir: Path,
    settings: Settings,
    seq_len: int,
    folder: Path,
    held_out: Sequence[Sample] = (),
    *,
    min_packed_steps: int = 0,
) -> PreparedInfo:
    """Tokenize, pack and order rows, and write them to ``folder`` (format: prepared.py).

    Held-out rows are written to ``folder``/heldout in the same format, and to heldout.jsonl with ``{"prompt",
    "reference", "messages", "line"}`` per row; ``prompt`` is rendered for the model, with special tokens.

    ``min_packed_steps``: rows are not packed if the run would have fewer optimizer steps.

    Raises UserError for rows that cannot be rendered, if no row is left, or if there are fewer rows than one
    batch.
    """
    model = _Model(model_dir, settings)
    _clear(folder)
    if TASKS[settings.task].draws_answers:  # rows are prompts; the other tokens are for the answer
        seq_len -= settings.rl.answer_tokens(seq_len)
    with _tokenized(train, model, settings, seq_len, folder / "documents") as documents:
        if not len(documents):
            raise UserError(
                f"Nothing is left to train on: none of {len(train):,} rows has a token that counts in the "
                f"loss within {seq_len:,} tokens.",
                "Raise --seq-len, or use --train-on-prompt.",
            )
        packing = _pack(documents, seq_len, settings.seed) if settings.packing is True else None
        if packing is not None and _packed_steps(packing, seq_len, settings) < min_packed_steps:
            packing = None
            print(
                f"packing is off: the packed rows would be fewer than {min_packed_steps} optimizer steps; "
                "--packing true packs them anyway"
            )
        settings = settings.model_copy(update={"packing": packing is not None})
        packing = packing or documents.unpacked()
        order = _order(_Lengths.of(documents, packing), settings)
        if held_out:
            _prepare_held_out(held_out, model, settings, seq_len, folder)
        if TASKS[settings.task].draws_answers:
            _write_prompts(folder, train, model)
        first_rows = islice(train, INSPECTED_ROWS)
        chats = settings.task != "pretrain" and any(conversation_of(row).messages for row in first_rows)
        prompt_format = PromptFormat.of(model.tokenizer, task=settings.task, chats=chats)
        return _write(documents, packing, order, model, seq_len, settings, folder, prompt_format)


@contextlib.contextmanager
def _tokenized(
    rows: Sequence[Sample], model: _Model, settings: Settings, seq_len: int, folder: Path
) -> Iterator[Documents]:
    """Tokenize the rows; the documents are deleted at the end of the block."""
    documents = tokenize(rows, model.folder, model.tokenizer, settings, seq_len, folder)
    try:
        yield documents
    finally:
        documents.close()


def format_sample(data: Prepared, tokenizer: Any, row: int = 0) -> str:
    """Format one row as text for people; tokens that do not count in the loss are between ⟦ and ⟧."""
    sample = data.row(row)
    lines = ["Text between ⟦ and ⟧ is input and does not count in the loss; the model learns the rest."]
    start = 0
    for number, length in enumerate(sample.lengths.tolist()):
        if TASKS[data.info.task].judged:
            lines.append(f"--- a {'good' if sample.desirable else 'bad'} answer, {length} tokens ---")
        elif TASKS[data.info.task].pairs:
            lines.append(f"--- {('chosen', 'rejected')[number]}, {length} tokens ---")
        elif len(sample.lengths) > 1:
            lines.append(
                f"--- document {number + 1} of {len(sample.lengths)} in this row, {length} tokens ---"
            )
        tokens = sample.tokens[start : start + length].tolist()
        masked = (sample.labels[start : start + length] == IGNORE).tolist()
        lines.append(_mark_masked(tokens, masked, tokenizer))
        start += length
    return "\n".join(lines)


def summary(info: PreparedInfo, dataset: str) -> str:
    """Format the size, lengths and losses by truncation of prepared data in a few lines."""
    kinds = ("rows", "row")
    if TASKS[info.task].pairs:
        kinds = ("pairs", "answer with its prompt")
    elif info.task == "pretrain":
        kinds = ("documents", "document")
    elif TASKS[info.task].draws_answers:
        kinds = ("prompts", "prompt")
    samples = info.documents - info.pieces + info.split_rows
    share = info.truncated_rows / max(samples + info.dropped_rows, 1)
    counted = (
        ""
        if TASKS[info.task].draws_answers
        else f", {info.label_tokens / max(info.tokens, 1):.0%} of them count in the loss"
    )
    lines = [
        f"{dataset}: {samples:,} {kinds[0]}, {info.tokens:,} tokens{counted}",
        f"tokens per {kinds[1]}: min {info.shortest:,}, median {info.median:,}, "
        f"95th percentile {info.p95:,}, max {info.longest:,}{' or more' * bool(info.cut_documents)} "
        f"(limit {info.seq_len:,})",
    ]
    if info.truncated_rows:
        position = "before their last" if TASKS[info.task].draws_answers else "at"
        lines.append(
            f"truncated {position} {info.seq_len:,} tokens: {info.truncated_rows:,} rows ({share:.1%})"
        )
        if info.cut_documents:
            lines[-1] += f"; {info.cut_documents:,} of more than {render.LONG_TEXT_CHARS:,} characters"
    elif info.split_rows:
        lines.append(
            f"split at {info.seq_len:,} tokens: {info.split_rows:,} documents, into {info.pieces:,} pieces"
        )
    if info.dropped_rows and info.task == "pretrain":
        lines.append(f"dropped: {info.dropped_rows:,} documents of one token, which cannot be predicted")
    elif info.dropped_rows:
        lines.append(f"dropped: {info.dropped_rows:,} rows whose answer is completely truncated")
    if info.packed:
        filled = info.tokens / (info.rows * info.seq_len)
        lines.append(f"packed into {info.rows:,} sequences, {filled:.0%} full")
    return "\n".join(lines)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack lengths into bins by best fit decreasing: the longest first, into the fullest bin with space.

    Returns the bins as lists of indices; equal lengths keep their order.
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # space left -> numbers of the bins
    spaces: list[int] = []  # keys of ``with_space`` that have bins, sorted
    progress = Progress("packing", len(lengths), "documents")
    for done, index in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        progress.at(done)
        position = bisect.bisect_left(spaces, lengths[index])
        if position == len(spaces):
            bins.append([])
            number, space = len(bins) - 1, capacity
        else:
            space = spaces[position]
            number = with_space[space].pop()
            if not with_space[space]:
                del spaces[position]
        bins[number].append(index)
        space_left = space - lengths[index]
        if space_left and not with_space.setdefault(space_left, []):
            bisect.insort(spaces, space_left)
        if space_left:
            with_space[space_left].append(number)
    return bins


class _Model:
    """Tokenizer and vocabulary size of a model."""

    def __init__(self, model_dir: Path, settings: Settings) -> None:
        self.folder = model_dir
        self.tokenizer = render.load_tokenizer(model_dir, settings)
        self.tokenizer_json = model_dir / "tokenizer.json"
        self.vocab_size = len(self.tokenizer)
        if (model_dir / "config.json").exists():
            config = json.loads((model_dir / "config.json").read_text())
            config = config.get("text_config") or config
            config_vocab = int(config.get("vocab_size", self.vocab_size))
            self.vocab_size = max(config_vocab, self.vocab_size) if settings.new_tokens else config_vocab

    @property
    def pad_id(self) -> int:
        return render.pad_id_of(self.tokenizer)


def _prepare_held_out(
    held_out: Sequence[Sample], model: _Model, settings: Settings, seq_len: int, folder: Path
) -> None:
    """Write held-out rows to ``folder``/heldout, and their prompts to heldout.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for sample in held_out:
            conversation = conversation_of(sample)
            prompt, reference = render.prompt_of(conversation, model.tokenizer)
            messages = [message.as_template() for message in conversation.prompt_messages]
            values = {"prompt": prompt, "reference": reference, "messages": messages}
            if conversation.images:
                values["images"] = [base64.b64encode(image).decode() for image in conversation.images]
            file.write(json.dumps(values | {"line": conversation.line}) + "\n")
    single_answer = settings.rl.model_copy(update={"group_size": 1})
    single_row = settings.model_copy(
        update={"packing": False, "global_batch_size": 1, "epochs": 1, "rl": single_answer}
    )
    with _tokenized(held_out, model, settings, seq_len, folder / "documents-held-out") as documents:
        if not len(documents):
            return
        packing = documents.unpacked()
        if documents.pieces:  # shuffle: only the first rows are evaluated, which may be of one document
            permutation = random_stream(settings.seed, "held-out pieces").permutation(len(packing))
            packing = packing.reordered(permutation)
        order = np.arange(len(packing), dtype=np.int32)
        if TASKS[settings.task].draws_answers:
            _write_prompts(folder / "heldout", held_out, model)
        _write(documents, packing, order, model, seq_len, single_row, folder / "heldout")


def _write_prompts(folder: Path, samples: Sequence[Sample], model: _Model) -> None:
    """Write the prompt of each row to prompts.jsonl, which scorers of sampled answers read."""
    folder.mkdir(parents=True, exist_ok=True)
    row_prompts = prompts.prompts_of(map(conversation_of, samples), model.tokenizer)
    prompts.write(folder / prepared.PROMPTS, row_prompts)


def _clear(folder: Path) -> None:
    """Delete files of an earlier run."""
    (folder / prepared.PROMPTS).unlink(missing_ok=True)
    (folder / "info.json").unlink(missing_ok=True)
    (folder / "heldout.jsonl").unlink(missing_ok=True)
    shutil.rmtree(folder / "heldout", ignore_errors=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lengths:
    """Lengths of rows in tokens, as arrays of shape [rows]."""

    tokens: NDArray[np.int64]
    widths: NDArray[np.int64]  # longest sequence of the row; a pair has two sequences

    @classmethod
    def of(cls, documents: Documents, packing: Packing) -> _Lengths:
        lengths = documents.lengths[packing.members].astype(np.int64)
        tokens = np.add.reduceat(lengths, packing.starts[:-1])
        widths = np.maximum.reduceat(lengths, packing.starts[:-1]) if documents.per_row > 1 else tokens
        return cls(tokens=tokens, widths=widths)


def _packed_steps(packing: Packing, seq_len: int, settings: Settings) -> int:
    """Return the number of optimizer steps of a packed run, by its epochs or its token budget."""
    sequences = len(packing) * (settings.epochs or 1)
    if settings.tokens is not None:
        sequences = settings.tokens // seq_len
    return sequences // settings.rows_per_step


def _pack(documents: Documents, seq_len: int, seed: int) -> Packing:
    """Pack documents into rows of at most ``seq_len`` tokens; documents of equal length in random order."""
    shuffled = random_stream(seed, "pack").permutation(len(documents.lengths))
    bins = best_fit(documents.lengths[shuffled].tolist(), seq_len)
    sizes = np.fromiter((len(members) for members in bins), dtype=np.int64, count=len(bins))
    members = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=len(shuffled))
    return Packing(members=shuffled[members], starts=np.concatenate([[0], np.cumsum(sizes)]))


def _order(lengths: _Lengths, settings: Settings) -> NDArray[np.int32]:
    """Return the row indices in training order, over all epochs."""
    batch, count = settings.rows_per_step, len(lengths.tokens)
    check_batch(count, "sequences after packing" if settings.packing else "rows to train on", settings)
    if settings.tokens is not None:
        return _order_of_tokens(lengths, settings.tokens, settings)
    steps = settings.steps_of(count)
    return _order_of_epochs(lengths, -(-steps * batch // count), settings)[: steps * batch]


def _order_of_tokens(lengths: _Lengths, budget: int, settings: Settings) -> NDArray[np.int32]:
    """Return the row indices of as few full batches as contain ``budget`` tokens (without padding).

    A larger budget extends the order of a smaller one.
    """
    passes = -(-budget // int(lengths.tokens.sum()))
    order = _order_of_epochs(lengths, passes + 1, settings)  # one extra epoch fills the last batch
    rows = int(np.searchsorted(np.cumsum(lengths.tokens[order]), budget)) + 1
    steps = -(-rows // settings.rows_per_step)
    return order[: steps * settings.rows_per_step]


def _order_of_epochs(lengths: _Lengths, epochs: int, settings: Settings) -> NDArray[np.int32]:
    """Return the row indices of ``epochs`` epochs, each in another random order."""
    count = len(lengths.tokens)
    shuffled = (random_stream(settings.seed, "epoch", epoch).permutation(count) for epoch in range(epochs))
    orders = [order.astype(np.int32) for order in shuffled]
    longest = settings.longest_first and not settings.packing
    if longest:
        orders[0] = longest_first(orders[0], lengths.widths, settings.rows_per_step)
    order = np.concatenate(orders)
    if not settings.group_by_length:
        return order
    return grouped_by_length(
        order, lengths.widths, settings.rows_per_step, seed=settings.seed, first=int(longest)
    )


def _write(
    documents: Documents,
    packing: Packing,
    order: NDArray[np.int32],
    model: _Model,
    seq_len: int,
    settings: Settings,
    folder: Path,
    prompt_format: PromptFormat | None = None,
) -> PreparedInfo:
    """Write a folder of prepared data, with ``prompt_format`` if given."""
    if documents.largest >= model.vocab_size:
        raise UserError(
            f"{model.tokenizer_json.parent}: the tokenizer has token {documents.largest}, but config.json "
            f"has vocab_size {model.vocab_size}.",
            "Tokenizer and weights belong to different models.",
        )
    rows, writer = len(packing), prepared.Writer(folder)
    desirable = documents.desirable[packing.members[packing.starts[:-1]] // documents.per_row]
    digest = _initial_digest(desirable, model, seq_len, settings)
    progress = Progress("writing", rows, "sequences")
    for number in range(rows):
        row = documents.row(packing.of_row(number))
        writer.add(row)
        for array in (row.lengths, row.tokens, row.labels):
            digest.update(array.tobytes())
        for image in row.images:
            digest.update(image.tobytes())
        progress.at(number)
    digest.update(order.tobytes())
    if prompt_format is not None:
        digest.update(prompt_format.to_json().encode())
        prompt_format.write(folder)
    lengths = _Lengths.of(documents, packing)
    info = PreparedInfo(
        rows=rows,
        tokens=int(lengths.tokens.sum()),
        label_tokens=writer.label_tokens,
        truncated_rows=documents.truncated,
        cut_documents=documents.cut,
        longest_row=int(lengths.widths.max()),
        seq_len=seq_len,
        packed=settings.packing is True,
        pad_id=model.pad_id,
        vocab_size=model.vocab_size,
        global_batch_size=settings.rows_per_step,
        total_steps=len(order) // settings.rows_per_step,
        seed=settings.seed,
        fingerprint=digest.hexdigest(),
        documents=len(documents),
        task=settings.task,
        dropped_rows=documents.dropped,
        split_rows=documents.split,
        pieces=documents.pieces,
        shortest=int(documents.full_lengths.min()),
        median=int(np.median(documents.full_lengths)),
        p95=int(np.percentile(documents.full_lengths, 95)),
        longest=int(documents.full_lengths.max()),
    )
    writer.finish(order, info)
    return info


def _initial_digest(
    desirable: NDArray[np.bool_], model: _Model, seq_len: int, settings: Settings
) -> hashlib._Hash:
    """Start the fingerprint of prepared data with tokenizer and settings; rows and order follow."""
    digest = hashlib.sha256(
        f"{seq_len} {settings.global_batch_size} {settings.packing} {model.pad_id}".encode()
    )
    if TASKS[settings.task].judged:
        digest.update(desirable.tobytes())
    if settings.trains_on_pairs:
        digest.update(b"pairs")
    if TASKS[settings.task].draws_answers:
        digest.update(f"answers {settings.rl.group_size}".encode())
    if settings.new_tokens:
        digest.update(repr(settings.new_tokens).encode())
    if model.tokenizer_json.exists():
        digest.update(model.tokenizer_json.read_bytes())
    return digest


def _mark_masked(tokens: list[int], masked: list[bool], tokenizer: Any) -> str:
    """Decode tokens, with masked sections between ⟦ and ⟧ and long sections shortened."""
    parts = []
    for is_masked, group in groupby(zip(tokens, masked, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group])
        if len(text) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
        parts.append(f"⟦{text}⟧" if is_masked else text)
    return "".join(parts)
