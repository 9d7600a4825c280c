"""Plain text for task pretrain: files that are read or refused, held-out text, and splitting."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from estimator.errors import UserError
from launchers import settings
from launchers.dataset import render, rows, texts
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.models import tiny_llama
from tests.launchers.dataset import chats

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def table(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def words(documents: list[Conversation]) -> list[tuple[str | None, int]]:
    return [(document.text, document.line) for document in documents]


class TestRead:
    def test_the_text_of_a_json_row_is_a_document_and_other_keys_are_ignored(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "d.jsonl", {"text": "one", "id": 1}, {**CHAT, "text": "two"})
        assert words(list(texts.read(path))) == [("one", 1), ("two", 2)]

    @pytest.mark.parametrize("name", ["book.txt", "BOOK.TXT"])
    def test_a_text_file_is_one_document(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes("\ufeffÉin Buch\r\n\r\nsecond\n".encode())
        assert words(list(texts.read(tmp_path / name))) == [("Éin Buch\r\n\r\nsecond\n", 0)]

    @pytest.mark.parametrize("name", ["book.txt", "book.jsonl"])
    def test_a_long_document_is_read_in_sections_with_the_same_tokens(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sections break between words and are stored and tokenized unchanged."""
        monkeypatch.setattr(texts, "SECTION", 1000)
        monkeypatch.setattr(texts, "_BREAK_WINDOW", 100)
        monkeypatch.setattr(texts, "_BLOCK", 7)  # characters of several bytes are cut by it
        book = "\n\n".join(f"Chapter {number}: the cat's 1st naïve “word”: ünd…" for number in range(100))
        if name == "book.txt":
            (tmp_path / name).write_text("\ufeff" + book, encoding="utf-8")
        else:
            jsonl(tmp_path / name, {"text": book})
        sections = chats.stored(texts.read(tmp_path / name), tmp_path / "stored")
        assert len(sections) == 5
        pieces = [section for section in sections if isinstance(section, Conversation)]
        assert "".join(section.text or "" for section in pieces) == book
        assert [(section.begins, section.ends) for section in pieces] == [
            (number == 0, number == 4) for number in range(5)
        ]
        model = tiny_llama.make(tmp_path / "model")
        tokenizer = render.load_tokenizer(model, settings.build({}))
        [(full_tokens, _)] = render.tokenize([Conversation(text=book)], tokenizer)
        parts = [tokens for tokens, _ in render.tokenize(pieces, tokenizer)]
        assert np.concatenate(parts).tolist() == full_tokens.tolist()

    def test_bytes_that_are_not_utf_8_are_counted_over_all_blocks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(texts, "_BLOCK", 7)
        for text, place in (("é" * 20 + "a", 42), ("a" + "é" * 20, 42), ("abcdef", 7)):
            (tmp_path / "d.txt").write_bytes(text.encode() + b"\xe9")
            with pytest.raises(UserError, match=rf"is not UTF-8 \(byte {place}\)"):
                list(texts.read(tmp_path / "d.txt"))

    def test_each_row_of_a_parquet_column_is_a_document_read_batch_by_batch(self, tmp_path: Path) -> None:
        expected_texts = [f"document {number}" for number in range(3000)]
        path = table(tmp_path / "d.parquet", other=list(range(3000)), text=expected_texts)
        assert words(list(texts.read(path))) == [
            (text, number) for number, text in enumerate(expected_texts, start=1)
        ]

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("d.txt", b"", "is empty"),
            ("d.txt", b"caf\xe9", "is not UTF-8 (byte 4)"),
            ("d.txt", b"\xef\xbb\xbf", "is empty"),
            ("d.txt", "Once".encode("utf-16"), "is UTF-16, not UTF-8"),
            (
                "d.jsonl",
                json.dumps(CHAT).encode(),
                "line 1: `messages`, but task pretrain needs plain text (`text`)",
            ),
            ("d.jsonl", b'{"text": 7}', "line 1: `text` is not text but int"),
            ("d.jsonl", b"{}", "line 1: nothing, but task pretrain"),
            ("d.parquet", b"no such thing", "cannot be read as Parquet"),
        ],
    )
    def test_an_unusable_text_file_is_named_in_one_line(
        self, tmp_path: Path, name: str, content: bytes, expected: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as refused:
            list(texts.read(tmp_path / name))
        assert expected in refused.value.problem
        assert name in refused.value.problem
        assert "\n" not in refused.value.problem

    @pytest.mark.parametrize(
        ("columns", "expected"),
        [
            ({"body": ["a"]}, "`body`, but task pretrain needs plain text (`text`)"),
            ({"text": ["a", None]}, "row 2: `text` is empty"),
            ({"text": [1]}, "row 1: `text` is not text but int"),
            ({"text": []}, "is empty"),
        ],
    )
    def test_a_table_without_a_usable_text_column_is_named_in_one_line(
        self, tmp_path: Path, columns: dict[str, list[Any]], expected: str
    ) -> None:
        with pytest.raises(UserError) as refused:
            list(texts.read(table(tmp_path / "d.parquet", **columns)))
        assert expected in refused.value.problem
        assert "\n" not in refused.value.problem

    def test_parquet_without_pyarrow_names_the_package_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = table(tmp_path / "d.parquet", text=["a"])
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(UserError, match="`pyarrow` package, which is not installed") as refused:
            list(texts.read(path))
        assert refused.value.advice == "pip install pyarrow"

    def test_a_missing_file_is_reported_in_one_line(self, tmp_path: Path) -> None:
        for name in ("gone.txt", "gone.parquet", "gone.jsonl"):
            with pytest.raises(UserError, match="cannot be read"):
                list(texts.read(tmp_path / name))

    def test_chats_become_text_with_one_turn_below_the_other(self) -> None:
        chat = Conversation(
            messages=(Message(role="user", content="Hi"), Message(role="assistant", content="Ho"))
        )
        assert words(texts.from_conversations([chat, rows.parse({"text": "x"}, 3)])) == [
            ("Hi\n\nHo", 0),
            ("x", 3),
        ]


class TestHoldOut:
    def test_complete_documents_are_held_out_in_random_order_as_long_as_they_fit(self) -> None:
        documents = [Conversation(text=text) for text in ("a" * 30, "b" * 900, "c" * 40, "d" * 30)]
        train, held_out = texts.hold_out(documents, 100, [1, 3, 2, 0], 256)
        assert list(held_out) == [documents[3], documents[2], documents[0]], "the book is too long"
        assert list(train) == [documents[1]]
        train, held_out = texts.hold_out(documents, 100, [1, 3, 2, 0], 1)
        assert (list(train), list(held_out)) == (documents[:3], documents[3:])

    def test_if_no_document_fits_the_end_of_the_longest_is_held_out_from_a_word_boundary(self) -> None:
        documents = [Conversation(text="short"), Conversation(text="word " * 100, line=2)]
        train, held_out = texts.hold_out(documents, 50, [1, 0], 256)
        assert held_out[0] == documents[0]
        assert (train[0].text or "") + (held_out[1].text or "") == documents[1].text
        assert (train[0].line, held_out[1].line) == (2, 2)
        assert 40 <= len(held_out[1].text or "") <= 50
        assert (held_out[1].text or "").startswith("word")

    def test_text_without_white_space_loses_at_most_half_to_the_held_out_part(self) -> None:
        [begin], [end] = texts.hold_out([Conversation(text="a" * 100)], 90, [0], 256)
        assert (begin.text, end.text) == ("a" * 50, "a" * 50)

    @pytest.mark.parametrize("text", ["a", "a ", "word   "])
    def test_nothing_is_held_out_if_nothing_would_be_left_to_train_on(self, text: str) -> None:
        train, held_out = texts.hold_out([Conversation(text=text)], 1, [], 256)
        assert (list(train), list(held_out)) == ([Conversation(text=text)], [])
        train, held_out = texts.hold_out([Conversation(text=text)], 0, [0], 256)
        assert (list(train), list(held_out)) == ([Conversation(text=text)], [])


class TestPieces:
    @given(length=st.integers(1, 500), longest=st.integers(3, 60))
    def test_evaluation_pieces_hold_every_token_and_each_predicts_at_least_one(
        self, length: int, longest: int
    ) -> None:
        sizes = texts.piece_lengths(length, longest)
        assert sum(sizes) == length
        assert max(sizes) <= longest
        assert length == 1 or min(sizes) >= 2
        assert len(sizes) == -(-length // longest)
