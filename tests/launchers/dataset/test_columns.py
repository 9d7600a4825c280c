import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset import preferences, prompts, rows, texts
from launchers.dataset.turns import Message
from launchers.run import preparation
from launchers.settings import build

SQUAD = {"id": "7", "question": "Why?", "answer": "So."}


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def error_of(read: Callable[[Path], Iterable[Any]], path: Path) -> UserError:
    with pytest.raises(UserError) as error:
        list(read(path))
    return error.value


@pytest.mark.parametrize(
    ("read", "row", "proposed"),
    [
        (rows.read, SQUAD, "prompt=question,response=answer"),
        (rows.read, {"query": "Why?", "Reply": "So."}, "prompt=query,response=Reply"),
        (rows.read, {"Prompt": "Why?", "Completion": "So."}, "prompt=Prompt,response=Completion"),
        (rows.read, {"dialog": [{"role": "user", "content": "Hi"}]}, "messages=dialog"),
        (rows.read, {"dialog": '[{"role": "user", "content": "Hi"}]'}, "messages=dialog"),
        (rows.read, {"prompt": "Why?", "answer": "So."}, "completion=answer"),
        (rows.read, {"document": "Once upon a time", "url": "x"}, "text=document"),
        (rows.read, {"question": "Why?", "answers": {"text": ["So."]}}, "prompt=COLUMN,response=COLUMN"),
        (rows.read, {"a": "Why?", "b": "So."}, "prompt=COLUMN,response=COLUMN"),
        (texts.read, {"body": "Once upon a time"}, "text=body"),
        (prompts.read, {"problem": "1 + 1"}, "prompt=problem"),
        (
            preferences.read,
            {"prompt": "Why?", "better": "So.", "worse": "No."},
            "chosen=better,rejected=worse",
        ),
        (preferences.read, {"question": "Why?", "chosen": "So.", "rejected": "No."}, "prompt=question"),
        (preferences.read_judged, {"prompt": "Why?", "completion": "So.", "liked": True}, "label=liked"),
    ],
)
def test_unknown_columns_are_reported_once_with_the_option_that_maps_them(
    tmp_path: Path, read: Callable[[Path], Iterable[Any]], row: dict[str, Any], proposed: str
) -> None:
    error = error_of(read, write(tmp_path / "d.jsonl", *[row] * 40))
    assert error.problem.count("\n") == 0
    assert "40 of 40 rows cannot be used: " in error.problem
    assert error.advice == f"Name its columns: --columns {proposed}"


@pytest.mark.parametrize(
    "columns", ["columns=prompt=question, response=answer", "columns={prompt: question, response: answer}"]
)
def test_mapped_columns_are_read_next_to_rows_with_supported_keys(
    tmp_path: Path, columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"instruction": "Add.", "output": "3"}
    path = write(tmp_path / "d.jsonl", SQUAD | {"prompt": "ignored"}, row)
    first, second = preparation.read_samples(build({"dataset": str(path)}, [columns]), path)
    assert isinstance(first, rows.Conversation)
    assert first.messages == (Message(role="user", content="Why?"), Message(role="assistant", content="So."))
    assert second == rows.parse(row)
    assert "`id` (1 rows)" in capsys.readouterr().err


def test_the_columns_of_a_table_are_mapped(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"body": ["a", "b"], "url": ["x", "y"]}), path)
    assert [row.text for row in texts.read(path, {"text": "body"})] == ["a", "b"]


def test_a_mapped_column_that_no_row_has_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", SQUAD, SQUAD)
    error = error_of(lambda path: rows.read(path, {"prompt": "quesion", "response": "answer"}), path)
    assert error.problem == f"Dataset {path} has no column `quesion` (--columns)."
    assert error.advice == "Did you mean question? It has `id`, `question`, `answer`."


@pytest.mark.parametrize(
    ("value", "reason"),
    [("promt=question", "Did you mean prompt"), ("question", "pairs of key and column")],
)
def test_an_invalid_mapping_is_refused(value: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build({}, [f"columns={value}"])
