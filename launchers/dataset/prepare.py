"""Tokenise once: cut or split, pack, fix the order of training, hold some rows out, and write it all down."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import Change, UserError
from estimator.setup import PAIR_TASKS
from launchers.dataset import prepared, prompts, render, texts
from launchers.dataset.preferences import Judged, Pair, Sample
from launchers.dataset.prepared import IGNORE, Prepared, PreparedInfo, Row
from launchers.dataset.rows import Conversation
from launchers.dataset.seeding import random_stream
from launchers.settings import Settings

MAX_HELD_OUT = 256
_SHOWN_CHARS = 1500  # of one stretch of a sample
_CHARACTERS = 4  # a token, in English: help.openai.com, "What are tokens and how to count them?"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    desirable: bool = True

    @property
    def has_answer(self) -> bool:
        """Whether anything counts."""
        return not bool((self.labels == IGNORE).all())

    def end(self, seq_len: int) -> _Document:
        """Its last ``seq_len`` tokens."""
        return replace(self, tokens=self.tokens[-seq_len:], labels=self.labels[-seq_len:])

    def cut(self, seq_len: int) -> _Document:
        """Its first ``seq_len`` tokens."""
        return replace(self, tokens=self.tokens[:seq_len], labels=self.labels[:seq_len])

    def pieces(self, seq_len: int) -> Iterator[_Document]:
        """All of it, in consecutive pieces of ``seq_len`` tokens; the last may be shorter.

        Only the last has the document's end of sequence. The first token of a piece does not count: what
        comes before it is in another row.
        """
        first = 0
        for length in texts.piece_lengths(len(self.tokens), seq_len):
            labels = self.labels[first : first + length].copy()
            labels[0] = IGNORE
            yield _Document(tokens=self.tokens[first : first + length], labels=labels)
            first += length


class _Documents:
    """Samples as tokens: one document each, of a pair the chosen and the rejected one, cut at ``seq_len``.

    Plain text of task pretrain is split there: a document is as many as it has pieces. Those with a document
    in which nothing counts are left out.
    """

    def __init__(self, samples: Sequence[Sample], tokenizer: Any, settings: Settings, seq_len: int) -> None:
        self.kept: list[tuple[_Document, ...]] = []
        self.lengths: list[int] = []  # in tokens, before they were cut or split
        self.truncated = self.dropped = self.split = self.pieces = 0
        if settings.task == "grpo":
            self._take_prompts(samples, tokenizer, seq_len)
            return
        splits = settings.task == "pretrain"
        for documents in _tokenised(samples, tokenizer, settings):
            longer = any(len(document.tokens) > seq_len for document in documents)
            self.truncated += longer and not splits
            fitting: list[tuple[_Document, ...]]
            if splits:
                fitting = [(piece,) for document in documents for piece in document.pieces(seq_len)]
            else:
                fitting = [tuple(document.cut(seq_len) for document in documents)]
            learnt = [some for some in fitting if all(document.has_answer for document in some)]
            if not learnt:
                self.dropped += 1
                continue
            if longer and splits:
                self.split += 1
                self.pieces += len(learnt)
            self.kept += learnt
            self.lengths += [len(document.tokens) for document in documents]

    def _take_prompts(self, samples: Sequence[Sample], tokenizer: Any, seq_len: int) -> None:
        """Prompts, of which nothing counts; of a longer one the end is kept, where its question is."""
        for prompt in prompts.prompts_of([_asked_of(sample) for sample in samples], tokenizer):
            ids = tokenizer(prompt.text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = np.array(ids, dtype=np.int32)
            whole = _Document(tokens=tokens, labels=np.full_like(tokens, IGNORE))
            self.truncated += len(tokens) > seq_len
            self.kept.append((whole.end(seq_len),))
            self.lengths.append(len(tokens))


def _tokenised(
    samples: Sequence[Sample], tokenizer: Any, settings: Settings
) -> Iterator[tuple[_Document, ...]]:
    pairs = settings.trains_on_pairs
    conversations: list[Conversation] = []
    for sample in samples:
        if isinstance(sample, Pair):
            conversations += (sample.chosen, sample.rejected)
        else:
            conversations.append(sample.conversation if isinstance(sample, Judged) else sample)
    good = [sample.desirable if isinstance(sample, Judged) else True for sample in samples]
    alone = pairs or settings.task == "kto"  # one answer of each conversation is weighed
    prompt_counts = settings.train_on_prompt and not alone
    rows = render.tokenise(conversations, tokenizer, train_on_prompt=prompt_counts, last_turn_only=alone)
    documents = (
        _Document(
            tokens=tokens,
            labels=np.where(counted, tokens, IGNORE).astype(np.int32),
            desirable=pairs or good[number],
        )
        for number, (tokens, counted) in enumerate(rows)
    )
    return zip(documents, documents, strict=True) if pairs else ((document,) for document in documents)


def split(samples: Sequence[Sample], settings: Settings) -> tuple[list[Sample], list[Sample]]:
    """Training rows in the order of the file, and held-out rows in a drawn order; the draw is seeded.

    ``evaluation.fraction`` of the rows, at least 1 and at most 256; none if it is 0, or if there is a
    held-out dataset of its own. Of plain text (task pretrain), the same share of each dataset's characters.
    """
    rows = list(samples)
    none = settings.evaluation.fraction == 0 or settings.evaluation.dataset is not None
    if settings.task == "pretrain" and not none:
        return _split_text(rows, settings)
    held_out = held_out_rows(len(rows), settings)
    chosen = set(held_out)
    return [row for index, row in enumerate(rows) if index not in chosen], [rows[i] for i in held_out]


def held_out_rows(count: int, settings: Settings) -> list[int]:
    """Which of so many rows :func:`split` holds out, plain text apart."""
    if settings.evaluation.fraction == 0 or settings.evaluation.dataset is not None or count < 2:
        return []
    wanted = min(max(1, round(settings.evaluation.fraction * count)), MAX_HELD_OUT, count - 1)
    drawn: list[int] = random_stream(settings.seed, "split").permutation(count)[:wanted].tolist()
    return drawn


def _split_text(rows: Sequence[Sample], settings: Settings) -> tuple[list[Sample], list[Sample]]:
    """Documents differ in length by far more than chats do: a share of them may be nearly all text, or none.

    No more is held out of a dataset than is measured: 256 sequences.
    """
    train: list[Sample] = []
    held_out: list[Sample] = []
    for source in sorted({row.source for row in rows}):
        documents = [row for row in rows if isinstance(row, Conversation) and row.source == source]
        wanted = round(settings.evaluation.fraction * sum(len(row.text or "") for row in documents))
        if settings.seq_len is not None:
            wanted = min(wanted, MAX_HELD_OUT * settings.seq_len * _CHARACTERS)
        drawn = random_stream(settings.seed, "split", source).permutation(len(documents)).tolist()
        kept, drawn_out = texts.hold_out(documents, wanted, drawn, MAX_HELD_OUT)
        train += kept
        held_out += drawn_out
    return train, held_out


def check_batch(rows: int, what: str, settings: Settings) -> None:
    """Raise UserError where there is less to train on than one batch. ``what``: the name of the rows."""
    if settings.task == "grpo" and rows < settings.rows_per_step:
        raise UserError(
            f"A step of global_batch_size {settings.global_batch_size} answers, rl.group_size "
            f"{settings.rl.group_size} to each prompt, takes {settings.rows_per_step} prompts, and there are "
            f"{rows:,}.",
            ("Give ", Change("global_batch_size", rows * settings.rl.group_size), " or less, or more data."),
        )
    if rows < settings.rows_per_step:
        raise UserError(
            f"global_batch_size {settings.global_batch_size} is more than the {rows:,} {what}.",
            ("Give ", Change("global_batch_size", rows), " or less, or more data."),
        )


def prepare(
    train: Sequence[Sample],
    model_dir: Path,
    settings: Settings,
    seq_len: int,
    folder: Path,
    held_out: Sequence[Sample] = (),
) -> PreparedInfo:
    """Write ``folder`` (see prepared.py) and, if there are held-out rows, ``folder``/heldout like it and
    ``folder``/heldout.jsonl: ``{"prompt", "reference", "messages", "line"}`` a row, ``prompt`` as the model
    sees it, special tokens included.

    Raises UserError where a row can't be rendered, where nothing is left, or where there are fewer rows than
    one batch.
    """
    model = _Model(model_dir, settings)
    _clear(folder)
    if settings.task == "grpo":  # the rest is for the answer
        seq_len -= settings.rl.answer_tokens(seq_len)
    documents = _Documents(train, model.tokenizer, settings, seq_len)
    if not documents.kept:
        raise UserError(
            f"Nothing is left to train on: none of {len(train):,} rows has a token that counts in the loss "
            f"within {seq_len:,} tokens.",
            ("Raise ", Change("seq_len"), ", or give ", Change("train_on_prompt", True), "."),
        )
    if settings.packing:
        rows = _pack([document for sample in documents.kept for document in sample], seq_len, settings.seed)
    else:
        rows = [_row(sample) for sample in documents.kept]
    order = _order(rows, settings)
    info = _info(documents, rows, order, model, seq_len, settings)
    if held_out:
        _prepare_held_out(held_out, model, settings, seq_len, folder)
    if settings.task == "grpo":
        _write_prompts(folder, train, model)
    prepared.write(folder, rows, order, info)
    return info


def sample_view(data: Prepared, tokenizer: Any, row: int = 0) -> str:
    """One row as the model sees it; tokens that do not count in the loss stand between ⟦ and ⟧."""
    sample = data.row(row)
    lines = ["⟦between these⟧: read by the model, not counted in the loss. The rest is what it learns."]
    start = 0
    for number, length in enumerate(sample.lengths.tolist()):
        if data.info.task == "kto":
            lines.append(f"--- a {'good' if sample.desirable else 'bad'} answer, {length} tokens ---")
        elif data.info.task in PAIR_TASKS:
            lines.append(f"--- {('chosen', 'rejected')[number]}, {length} tokens ---")
        elif len(sample.lengths) > 1:
            lines.append(
                f"--- document {number + 1} of {len(sample.lengths)} in this row, {length} tokens ---"
            )
        tokens = sample.tokens[start : start + length].tolist()
        masked = (sample.labels[start : start + length] == IGNORE).tolist()
        lines.append(_marked(tokens, masked, tokenizer))
        start += length
    return "\n".join(lines)


def summary(info: PreparedInfo, dataset: str) -> str:
    """What the dataset came to, in a few lines."""
    kinds = ("rows", "a row")
    if info.task in PAIR_TASKS:
        kinds = ("pairs", "an answer with its prompt")
    elif info.task == "pretrain":
        kinds = ("documents", "a document")
    elif info.task == "grpo":
        kinds = ("prompts", "a prompt")
    samples = info.documents - info.pieces + info.split_rows
    share = info.truncated_rows / max(samples + info.dropped_rows, 1)
    counted = f", {info.label_tokens / max(info.tokens, 1):.0%} of them count in the loss"
    lines = [
        f"{dataset}: {samples:,} {kinds[0]}, {info.tokens:,} tokens{'' if info.task == 'grpo' else counted}",
        f"tokens {kinds[1]}: min {info.shortest:,}, median {info.median:,}, 95 % up to {info.p95:,}, "
        f"max {info.longest:,}",
    ]
    if info.truncated_rows:
        where = "before their last" if info.task == "grpo" else "at"
        lines.append(f"cut {where} {info.seq_len:,} tokens: {info.truncated_rows:,} rows ({share:.1%})")
    elif info.split_rows:
        lines.append(
            f"split at {info.seq_len:,} tokens: {info.split_rows:,} documents, into {info.pieces:,} pieces"
        )
    else:
        lines.append(f"none is longer than {info.seq_len:,} tokens")
    if info.dropped_rows and info.task == "pretrain":
        lines.append(f"left out: {info.dropped_rows:,} documents of one token, which nothing predicts")
    elif info.dropped_rows:
        lines.append(f"left out: {info.dropped_rows:,} rows whose answer lies behind the cut")
    if info.packed:
        filled = info.tokens / (info.rows * info.seq_len)
        lines.append(f"packed into {info.rows:,} sequences, {filled:.0%} full")
    return "\n".join(lines)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: each length, in order, goes into the first bin with enough room left.

    The bins are the leaves of a binary tree (the children of node n are 2n and 2n + 1), whose nodes know the
    most room that a bin below them has left: a million lengths take seconds.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        # Unopened bins have full room, so the first that fits is opened already or the next to be.
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def longest_first(order: NDArray[np.int32], lengths: NDArray[np.int64], batch: int) -> NDArray[np.int32]:
    """``order`` with its ``batch`` longest rows in front, the longest first; each swaps with what was there.

    Rank r of any number of processes then begins with the r-th longest row, and no later micro batch of this
    order, of whatever size, is wider. Rows of one length keep their order.
    """
    result, place_of = order.copy(), np.argsort(order)
    longest = order[np.argsort(-lengths[order], kind="stable")[:batch]]
    for place, row in enumerate(longest):
        other, moved = place_of[row], result[place]
        result[place], result[other] = row, moved
        place_of[row], place_of[moved] = place, other
    return result


class _Model:
    """What is needed of the model: its tokenizer, and how many tokens it knows."""

    def __init__(self, model_dir: Path, settings: Settings) -> None:
        self.tokenizer = render.load_tokenizer(model_dir, settings)
        self.tokenizer_json = model_dir / "tokenizer.json"
        self.vocab_size = len(self.tokenizer)
        if (model_dir / "config.json").exists():
            config = json.loads((model_dir / "config.json").read_text())
            known = int(config.get("vocab_size", self.vocab_size))
            self.vocab_size = max(known, self.vocab_size) if settings.new_tokens else known

    @property
    def pad_id(self) -> int:
        return render.pad_id_of(self.tokenizer)


def _prepare_held_out(
    held_out: Sequence[Sample], model: _Model, settings: Settings, seq_len: int, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for sample in held_out:
            conversation = _asked_of(sample)
            prompt, reference = render.prompt_of(conversation, model.tokenizer)
            messages = [{"role": m.role, "content": m.content} for m in conversation.asked]
            values = {"prompt": prompt, "reference": reference, "messages": messages}
            file.write(json.dumps(values | {"line": conversation.line}) + "\n")
    documents = _Documents(held_out, model.tokenizer, settings, seq_len)
    if not documents.kept:
        return
    alone = settings.rl.model_copy(update={"group_size": 1})
    one_by_one = settings.model_copy(
        update={"packing": False, "global_batch_size": 1, "epochs": 1, "rl": alone}
    )
    rows = [_row(sample) for sample in documents.kept]
    if documents.pieces:  # of which the first few are measured: not those of one document
        drawn = random_stream(settings.seed, "held-out pieces").permutation(len(rows))
        rows = [rows[index] for index in drawn]
    order = np.arange(len(rows), dtype=np.int32)
    info = _info(documents, rows, order, model, seq_len, one_by_one)
    if settings.task == "grpo":
        _write_prompts(folder / "heldout", held_out, model)
    prepared.write(folder / "heldout", rows, order, info)


def _write_prompts(folder: Path, samples: Sequence[Sample], model: _Model) -> None:
    """Each row's prompt for those who score its answers: prompts.jsonl, in the order of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [_asked_of(sample) for sample in samples]
    prompts.write(folder / prepared.PROMPTS, prompts.prompts_of(asked, model.tokenizer))


def _asked_of(sample: Sample) -> Conversation:
    """The conversation whose prompt the models are asked."""
    if isinstance(sample, Pair):
        return sample.chosen
    return sample.conversation if isinstance(sample, Judged) else sample


def _clear(folder: Path) -> None:
    """Take away what an earlier run has left, so that nothing old is taken for new."""
    (folder / prepared.PROMPTS).unlink(missing_ok=True)
    (folder / "info.json").unlink(missing_ok=True)
    (folder / "heldout.jsonl").unlink(missing_ok=True)
    shutil.rmtree(folder / "heldout", ignore_errors=True)


def _row(documents: Sequence[_Document]) -> Row:
    return Row(
        tokens=np.concatenate([d.tokens for d in documents]),
        labels=np.concatenate([d.labels for d in documents]),
        lengths=np.array([len(d.tokens) for d in documents], dtype=np.int32),
        desirable=all(d.desirable for d in documents),
    )


def _width(row: Row, settings: Settings) -> int:
    """Tokens of the longest sequence that a row makes; a pair makes two."""
    return int(row.lengths.max()) if settings.trains_on_pairs else len(row.tokens)


def _pack(documents: Sequence[_Document], seq_len: int, seed: int) -> list[Row]:
    shuffled = [documents[index] for index in random_stream(seed, "pack").permutation(len(documents))]
    bins = first_fit([len(document.tokens) for document in shuffled], seq_len)
    return [_row([shuffled[index] for index in members]) for members in bins]


def _order(rows: Sequence[Row], settings: Settings) -> NDArray[np.int32]:
    """Rows in the order of the whole run, epochs included."""
    batch, count = settings.rows_per_step, len(rows)
    check_batch(count, "sequences after packing" if settings.packing else "rows to train on", settings)
    if settings.tokens is not None:
        return _order_of_tokens(rows, settings.tokens, settings)
    steps = settings.epochs * count // batch
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    return _epochs(rows, -(-steps * batch // count), settings)[: steps * batch]


def _order_of_tokens(rows: Sequence[Row], budget: int, settings: Settings) -> NDArray[np.int32]:
    """The fewest whole batches whose rows hold ``budget`` tokens, padding not counted.

    More tokens are the same order for longer.
    """
    lengths = np.array([len(row.tokens) for row in rows])
    passes = -(-budget // int(lengths.sum()))
    order = _epochs(rows, passes + 1, settings)  # one more, out of which the last batch is filled
    needed = int(np.searchsorted(np.cumsum(lengths[order]), budget)) + 1
    steps = -(-needed // settings.global_batch_size)
    return order[: steps * settings.global_batch_size]


def _epochs(rows: Sequence[Row], epochs: int, settings: Settings) -> NDArray[np.int32]:
    """So many times all rows, each time in another order."""
    drawn = (random_stream(settings.seed, "epoch", epoch).permutation(len(rows)) for epoch in range(epochs))
    orders = [order.astype(np.int32) for order in drawn]
    if settings.longest_first and not settings.packing:
        widths = np.array([_width(row, settings) for row in rows])
        orders[0] = longest_first(orders[0], widths, settings.rows_per_step)
    return np.concatenate(orders)


def _info(
    documents: _Documents,
    rows: Sequence[Row],
    order: NDArray[np.int32],
    model: _Model,
    seq_len: int,
    settings: Settings,
) -> PreparedInfo:
    largest = max(int(row.tokens.max()) for row in rows)
    if largest >= model.vocab_size:
        raise UserError(
            f"{model.tokenizer_json.parent}: the tokenizer makes token {largest}, but config.json says "
            f"vocab_size {model.vocab_size}.",
            "Tokenizer and weights are of different models.",
        )
    return PreparedInfo(
        rows=len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        label_tokens=sum(int((row.labels != IGNORE).sum()) for row in rows),
        truncated_rows=documents.truncated,
        longest_row=max(_width(row, settings) for row in rows),
        seq_len=seq_len,
        packed=settings.packing,
        pad_id=model.pad_id,
        vocab_size=model.vocab_size,
        global_batch_size=settings.rows_per_step,
        total_steps=len(order) // settings.rows_per_step,
        seed=settings.seed,
        fingerprint=_fingerprint(rows, order, model, seq_len, settings),
        documents=len(documents.kept),
        task=settings.task,
        dropped_rows=documents.dropped,
        split_rows=documents.split,
        pieces=documents.pieces,
        shortest=min(documents.lengths),
        median=int(np.median(documents.lengths)),
        p95=int(np.percentile(documents.lengths, 95)),
        longest=max(documents.lengths),
    )


def _fingerprint(
    rows: Sequence[Row], order: NDArray[np.int32], model: _Model, seq_len: int, settings: Settings
) -> str:
    """sha256 over the tokenizer's file, the rows as tokens and labels, their order and the batch."""
    digest = hashlib.sha256(
        f"{seq_len} {settings.global_batch_size} {settings.packing} {model.pad_id}".encode()
    )
    if settings.task == "kto":
        digest.update(bytes(row.desirable for row in rows))
    if settings.trains_on_pairs:
        digest.update(b"pairs")
    if settings.task == "grpo":
        digest.update(f"answers {settings.rl.group_size}".encode())
    if settings.new_tokens:
        digest.update(repr(settings.new_tokens).encode())
    if model.tokenizer_json.exists():
        digest.update(model.tokenizer_json.read_bytes())
    for row in rows:
        for array in (row.lengths, row.tokens, row.labels):
            digest.update(array.tobytes())
    digest.update(order.tobytes())
    return digest.hexdigest()


def _marked(tokens: list[int], masked: list[bool], tokenizer: Any) -> str:
    parts = []
    for is_masked, group in groupby(zip(tokens, masked, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group])
        if len(text) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
        parts.append(f"⟦{text}⟧" if is_masked else text)
    return "".join(parts)
