import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from estimator.errors import UserError
from launchers.dataset import render, tokenization
from launchers.dataset.documents import Documents
from launchers.dataset.prepare import prepare
from launchers.dataset.render import load_tokenizer
from launchers.dataset.rows import Conversation, parse
from launchers.dataset.stored import Selected, StoredRows, Writer
from launchers.dataset.tokenization import tokenize
from launchers.models import tiny_llama
from launchers.settings import Settings, build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny")


def chats(count: int) -> list[Conversation]:
    return [
        parse({"prompt": f"What is {n} + 1?", "completion": f"It is {n + 1}."}, n + 1) for n in range(count)
    ]


def stored(folder: Path, rows: list[Conversation]) -> StoredRows:
    with Writer(folder) as writer:
        for row in rows:
            writer.add(row)
    return StoredRows(folder)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize with two processes in chunks of 16 rows."""
    monkeypatch.setattr(tokenization, "SINGLE_PROCESS_BYTES", 0)
    monkeypatch.setattr(tokenization, "CHUNK_ROWS", 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def content(tokenized: Documents) -> list[Any]:
    rows = [tokenized.row(np.array([number])) for number in range(len(tokenized))]
    return [(row.tokens.tolist(), row.labels.tolist()) for row in rows]


def test_a_chunk_ends_at_the_maximum_number_of_rows_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "CHUNK_ROWS", 3)
    monkeypatch.setattr(tokenization, "CHUNK_BYTES", 10)
    assert tokenization._chunk_boundaries(np.array([1, 1, 1, 1, 8, 2, 99, 1])) == [0, 3, 5, 6, 7, 8]
    assert tokenization._chunk_boundaries(np.array([])) == [0]


def test_many_short_rows_are_tokenized_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "SINGLE_PROCESS_ROWS", 32)
    for count, is_small in ((31, True), (32, False)):
        rows = tokenization._RowsOnDisk.of(stored(tmp_path / str(count), chats(count)))
        assert rows is not None
        assert rows.sizes.sum() < tokenization.SINGLE_PROCESS_BYTES
        assert rows.is_small is is_small


def test_a_very_long_text_gives_the_same_tokens_although_its_end_is_not_tokenized(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(f"word{number}" for number in range(5_000))
    rows = [
        parse({"prompt": "Tell", "completion": words}, 1),
        parse({"prompt": "Tell", "completion": "0aF" * 9_000}, 2),  # a single word
        parse({"prompt": words, "completion": "yes"}, 3),
        parse({"prompt": " " * 20_000 + "Tell", "completion": "yes"}, 4),  # trimmed by the template
        parse({"text": words}, 5),
        *chats(3),
    ]
    settings = build({"global_batch_size": 4})
    tokenizer = load_tokenizer(model, settings)
    complete = tokenize(rows, model, tokenizer, settings, 48, tmp_path / "complete")
    monkeypatch.setattr(render, "LONG_TEXT_CHARS", 2_000)
    limited = tokenize(rows, model, tokenizer, settings, 48, tmp_path / "limited")
    assert (complete.cut, limited.cut) == (0, 4)
    assert content(limited) == content(complete)
    assert (limited.truncated, limited.dropped) == (complete.truncated, complete.dropped) == (4, 1)
    assert max(limited.full_lengths) < max(complete.full_lengths) / 4


def test_preparation_leaves_no_temporary_documents_in_its_folder(model: Path, tmp_path: Path) -> None:
    prepare(chats(8), model, build({"global_batch_size": 4}), 128, tmp_path, chats(2))
    assert not [path for path in tmp_path.rglob("*") if "documents" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [{"packing": False}, {"packing": True}, {"task": "grpo", "rl": {"group_size": 2}}]
)
@pytest.mark.nightly
def test_several_processes_tokenize_the_same_rows_in_the_same_order_as_one(
    model: Path, tmp_path: Path, several: None, values: dict[str, Any]
) -> None:
    rows = [*chats(100), Conversation(text="word " * 200)]
    settings = build({"global_batch_size": 4, **values})
    one = prepare(rows, model, settings, 64, tmp_path / "one")
    two = prepare(stored(tmp_path / "rows", rows), model, settings, 64, tmp_path / "two")
    assert one == two
    for path in [*(tmp_path / "one").glob("*.npy"), *(tmp_path / "one").glob("*.jsonl")]:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.slow
@pytest.mark.nightly
def test_several_processes_tokenize_selected_rows_and_name_an_invalid_one(
    model: Path, tmp_path: Path, several: None
) -> None:
    settings = Settings()
    tokenizer = load_tokenizer(model, settings)
    base = stored(tmp_path / "rows", chats(60))
    rows = Selected(base, np.arange(59, -1, -1), {3: Conversation(text="instead", line=57)})
    tokenized = tokenize(rows, model, tokenizer, settings, 64, tmp_path / "a")
    alone = tokenize(list(rows), model, tokenizer, settings, 64, tmp_path / "b")
    assert content(tokenized) == content(alone)
    template = "{% if '44' in messages[0]['content'] %}{{ raise_exception('no 44') }}{% endif %}"
    refusing = build(
        {"chat_template": template + "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"}
    )
    with pytest.raises(UserError, match="line 45: the chat template refuses it: no 44"):
        tokenize(base, model, load_tokenizer(model, refusing), refusing, 64, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_killed_tokenizer_process_is_reported_in_one_line(
    model: Path, tmp_path: Path, several: None
) -> None:
    def kill_one() -> None:
        for _ in range(600):
            for child in psutil.Process().children():
                if "launchers.dataset.tokenization" in child.cmdline():
                    child.kill()
                    return
            time.sleep(0.05)

    base = stored(tmp_path / "rows", chats(60))
    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(UserError, match="A process that tokenizes was ended by SIGKILL") as error:
        tokenize(base, model, None, Settings(), 64, tmp_path / "a")
    killer.join()
    assert "memory" in error.value.advice
    assert not (tmp_path / "a").exists()
