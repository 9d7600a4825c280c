from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launchers.dataset.picture import Picture
from launchers.dataset.preferences import Judged, Pair, Sample
from launchers.dataset.rows import Conversation, parse
from launchers.dataset.stored import Selected, StoredRows, Writer, characters_of, concatenate, sources_of

CHAT = parse(
    {"messages": [{"role": "user", "content": "Hi é\n"}, {"role": "assistant", "content": "Yes"}]}, 3
)
TEXT = Conversation(text="Once upon a time", line=9)
ROWS: list[Sample] = [
    CHAT,
    TEXT.with_source(2),
    Pair(chosen=CHAT, rejected=CHAT.with_source(0)),
    Judged(conversation=CHAT, desirable=False),
    Picture(caption="a “red”\ncircle", image=bytes(range(256)), width=64, height=48, line=5).with_source(1),
]


def stored(folder: Path, rows: list[Any]) -> StoredRows:
    with Writer(folder) as writer:
        for row in rows:
            writer.add(row)
    return StoredRows(folder)


def test_every_kind_of_row_is_read_back_unchanged(tmp_path: Path) -> None:
    rows = stored(tmp_path, ROWS)
    assert list(rows) == ROWS
    assert (rows[-1], rows[1:3], len(rows)) == (ROWS[-1], ROWS[1:3], 5)
    assert [(row.line, row.source) for row in rows] == [(3, 0), (9, 2), (3, 0), (3, 0), (5, 1)]
    assert sources_of(rows).tolist() == [0, 2, 0, 0, 1]
    assert characters_of(rows).tolist() == [0, len("Once upon a time"), 0, 0, 0]
    with pytest.raises(IndexError):
        rows[5]


def test_equal_rows_have_equal_fingerprints_and_different_rows_do_not(tmp_path: Path) -> None:
    first, second_fingerprint, other = (
        stored(tmp_path / name, rows).fingerprint
        for name, rows in (("a", ROWS), ("b", ROWS), ("c", [*ROWS, CHAT]))
    )
    assert first == second_fingerprint != other


def test_a_folder_whose_writing_was_interrupted_is_incomplete(tmp_path: Path) -> None:
    bad: Any = None
    with pytest.raises(AttributeError):
        stored(tmp_path, [CHAT, bad])
    with pytest.raises(FileNotFoundError):
        StoredRows(tmp_path)


@pytest.mark.parametrize("kind", ["in a file", "at hand"])
def test_a_selection_of_a_selection_composes_both(kind: str, tmp_path: Path) -> None:
    texts: list[Any] = [Conversation(text=name, source=place % 2) for place, name in enumerate("abcdef")]
    rows = stored(tmp_path, texts) if kind == "in a file" else texts
    odd = Selected(rows, np.array([5, 3, 1]), {5: Conversation(text="FFF", source=1)})
    some = Selected(odd, np.array([0, 2, 0]))
    assert [row.text for row in some] == ["FFF", "b", "FFF"]  # type: ignore[union-attr]
    assert [row.text for row in odd[1:]] == ["d", "b"]  # type: ignore[union-attr]
    assert sources_of(odd).tolist() == [1, 1, 1]
    assert characters_of(odd).tolist() == [3, 1, 1]
    assert [row.text for row in concatenate([odd, Selected(rows, np.array([0]))])] == ["FFF", "d", "b", "a"]  # type: ignore[union-attr]
