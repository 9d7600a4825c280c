import csv
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyarrow import parquet

from estimator.errors import UserError
from launchers.dataset import files
from launchers.dataset.preferences import read_judged
from launchers.dataset.rows import read

CHAT = [{"role": "user", "content": "Hi, “you”\n\nthere"}, {"role": "assistant", "content": "é, ja"}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"messages": [{"role": "system", "content": "Be brief."}, *CHAT, *CHAT]},
] * 3


def as_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "messages"])
        writer.writerows([number, json.dumps(row["messages"])] for number, row in enumerate(ROWS))


def save_with_datasets(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


FORMS: dict[str, Any] = {
    "d.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "d.rows": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "list.json": lambda path: path.write_text(json.dumps(ROWS)),
    "pretty.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "list.jsonl": lambda path: path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8"),
    "objects.json": lambda path: path.write_text("\n".join(json.dumps(row, indent=2) for row in ROWS)),
    "d.csv": as_csv,
    "semicolons.csv": lambda path: as_csv(path, ";"),
    "d.tsv": lambda path: as_csv(path, "\t"),
    "d.parquet": lambda path: parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "d.PQ": lambda path: parquet.write_table(pyarrow.Table.from_pylist(ROWS), path),
    "saved": save_with_datasets,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_file_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    FORMS[name](tmp_path / name)
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert list(read(tmp_path / name)) == list(read(tmp_path / "plain.jsonl"))
    rows = files.open_rows(tmp_path / name)
    assert 0 < [rows.share() for _ in rows][-1] <= 1


words = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(values, max_size=8),
    indent=st.sampled_from([None, 0, 3]),
    piece=st.integers(1, 60),
    ascii_only=st.booleans(),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_json_list_is_read_completely_wherever_its_blocks_end(
    rows: list[Any],
    indent: int | None,
    piece: int,
    ascii_only: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("lists") / "d.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "_CHUNK", piece)
        assert [value for _, value in files.open_rows(path)] == rows


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_csv_may_declare_its_separator_as_excel_reads_it(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(f"\ufeffsep={separator}\r\nid{separator}text\r\n1{separator}a, b\r\n2\r\n".encode())
    good, (number, bad) = files.open_rows(path)
    assert good == (3, {"id": "1", "text": "a, b"})
    assert number == 4
    assert isinstance(bad, files.BadRow)


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd", "UTF-16", "latin-1"])
def test_a_file_to_convert_is_refused_with_the_command_that_converts_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"text": "café"}, ensure_ascii=False)
    (tmp_path / "my data").mkdir()
    path = tmp_path / "my data" / "d.jsonl"
    monkeypatch.chdir(tmp_path)
    if kind in ("UTF-16", "latin-1"):
        path.write_text(text, encoding=kind)
    elif shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed")
    else:
        path.write_text(text, encoding="utf-8")
        packed = subprocess.run([kind, "-c", path], check=True, capture_output=True).stdout
        path.write_bytes(packed)
    with pytest.raises(UserError) as error:
        list(read(path.relative_to(tmp_path)))
    command = error.value.advice.partition(": ")[2].replace("ENCODING", "ISO-8859-1")
    subprocess.run(["bash", "-c", command], check=True)
    (converted,) = (other for other in path.parent.iterdir() if other != path)
    assert [row.text for row in read(converted)] == ["café"]


def test_errors_in_an_indented_json_list_name_the_line_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}, {"texts": "c"}], indent=2))
    with pytest.raises(UserError, match=r"d\.json, line 8: unknown key `texts`"):
        list(read(path))
    path.write_text(json.dumps([{"text": "a"}, {"texts": "c"}]))
    with pytest.raises(UserError, match=r"d\.json, row 2: unknown key `texts`"):
        list(read(path))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("d.json", '[{"text": "a"}, {"text": "b"]', "row 2: not JSON (Expecting ',' delimiter, line 1)"),
        ("d.json", '[{"text": "a"}', "row 2: not JSON (Expecting ']'"),
        ("d.json", '[{"text": "a"}] more', "more text after the list"),
        ("d.json", '[\n{"text": "a"},\n{"text": "b",}]', "line 3: not JSON ("),
        ("d.json", "[1]", "row 1: not a JSON object but 1"),
        ("d.json", "[" * 100_000, "nested too deeply"),
        ("d.json", "[]", "d.json is empty"),
        ("d.csv", "text\n", "d.csv is empty"),
        ("d.csv", "text,id\na,1\nb\n", "line 3: 1 field, but the header names 2"),
        ("d.csv", "text,text\na,b\n", "has two columns `text`"),
        ("d.csv", 'text\n"a\n', "line 2: not CSV ("),
        ("d.csv", "question,answer\na,b\n", "line 2: keys `question`, `answer`: none of"),
        ("d.csv", "messages\nHi\n", "line 2: `messages` is not a list"),
        ("d.csv", b"text\na\ncaf\xe9\n", "line 3: not UTF-8 (byte 4)"),
        ("d.json", b'[{"text": "a"},\n{"text": "caf\xe9"}]', "line 2: not UTF-8 (byte 14)"),
        ("d.parquet", "text", "d.parquet cannot be read as Parquet"),
        ("d.xlsx", b"PK\x03\x04\0\0", "d.xlsx is a zip archive, or a spreadsheet"),
        ("d.jsonl", b"\x28\xb5\x2f\xfd", "d.jsonl is compressed (zstd)"),
        ("d.jsonl", '{"text": "a"}'.encode("utf-16"), "d.jsonl is UTF-16, not UTF-8"),
        ("d.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not the data"),
        ("d.jsonl", '{"text": "a", "text": "b"}', "line 1: the key `text` is repeated"),
        ("d.jsonl", '{"text": ' + "9" * 5000 + "}", "line 1: a number of 5,000 digits"),
        ("d.md", "# Words", "d.md has an unknown format"),
        ("d.jsonl", b'{"text": "\0"}\n', "d.jsonl has an unknown format"),
    ],
)  # fmt: skip
def test_an_unreadable_file_is_reported_in_one_line(
    name: str, content: str | bytes, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        list(read(path))
    assert expected in error.value.problem
    assert "\n" not in error.value.problem
    if "unknown format" in expected:
        assert error.value.advice == f"Use {files.FORMS}."


def test_an_empty_folder_and_a_broken_folder_are_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder without rows"):
        list(read(tmp_path))
    save_with_datasets(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match="saved cannot be read: ") as error:
        list(read(tmp_path / "saved"))
    assert "\n" not in error.value.problem


def test_cells_of_a_table_may_be_empty_and_may_contain_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('instruction,input,output\n"Add\nthem.",,3\n"Why?",5,"So."\n')
    first, second = read(path)
    assert [(message.role, message.content) for message in first.messages] == [
        ("user", "Add\nthem."), ("assistant", "3"),
    ]  # fmt: skip
    assert second.messages[0].content == "Why?\n\n5"
    assert [first.line, second.line] == [2, 4]


def test_booleans_in_a_csv_file_are_read_as_labels(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("prompt,completion,label\na,b,True\na,c,false\n")
    assert [row.desirable for row in read_judged(path)] == [True, False]


def test_unused_keys_are_reported_once_with_their_number_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    given = [{"text": "a", "id": n, "url": "x" if n > 2 else None} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    assert len(list(read(path))) == 5
    report_line = f"Dataset {path}: these keys are not used: `id` (5 rows), `url` (2 rows)\n"
    assert capsys.readouterr().err == report_line
