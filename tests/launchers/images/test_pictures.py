import csv
import io
import json
import tarfile
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.dataset import drawn_shapes
from launchers.images.pictures import read
from tests.launchers.images.encoded import encoded

pytest.importorskip("PIL")
RED, PNG = encoded(kind="JPEG"), encoded()


def folder(path: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def read_images(path: Path) -> list[tuple[str, bytes, int]]:
    return [(picture.caption, picture.image, picture.line) for picture in read(path, min_side=8)]


def problem(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read(path, min_side=8))
    return str(caught.value)


def lines(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_drawn_shapes_dataset_is_read(tmp_path: Path) -> None:
    pictures = list(read(drawn_shapes.write(tmp_path / "shapes", 20), min_side=32))
    assert [(picture.caption, picture.image) for picture in pictures] == list(drawn_shapes.draw_images(20))
    assert [picture.line for picture in pictures] == list(range(1, 21))
    assert {(picture.width, picture.height) for picture in pictures} == set(drawn_shapes.FORMATS)


@pytest.mark.parametrize(
    ("name", "form", "column"),
    [
        ("metadata", "jsonl", "text"),
        ("metadata", "csv", "caption"),
        ("metadata", "parquet", "prompt"),
        ("rows", "jsonl", "caption"),
        ("rows", "csv", "text"),
        ("rows", "parquet", "text"),
    ],
)
def test_tables_with_image_and_caption_columns_are_read(
    name: str, form: str, column: str, tmp_path: Path
) -> None:
    key = "file_name" if name == "metadata" else "image"
    rows = [{key: "a.jpg", column: " one "}, {key: "sub/b.png", column: "two, or more"}]
    folder(tmp_path, {"a.jpg": RED, "sub/b.png": PNG, "sub/not-named.png": b"x"})
    table = tmp_path / f"{name}.{form}"
    if form == "jsonl":
        table.write_text(lines(*rows))
    elif form == "csv":
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, [key, column])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), table)
    first = 2 if form == "csv" else 1
    expected = [("one", RED, first), ("two, or more", PNG, first + 1)]
    assert read_images(tmp_path if name == "metadata" else table) == expected


def test_images_stored_in_parquet_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"image": {"bytes": RED, "path": None}, "caption": "in the file"}]
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet"
    )
    assert read_images(tmp_path / "a.parquet") == [("in the file", RED, 1)]


def test_captions_in_text_files_next_to_the_images_are_read(tmp_path: Path) -> None:
    folder(tmp_path, {"a.jpg": RED, "a.txt": "one\n", "b/c.d.PNG": PNG, "b/c.d.txt": "\ufefftwo"})
    assert read_images(tmp_path) == [("one", RED, 1), ("two", PNG, 2)]


def test_tar_files_are_read_like_webdataset(tmp_path: Path) -> None:
    tar(
        tmp_path / "1.tar",
        {"k/0.jpg": RED, "k/0.txt": "one", "k/1.json": '{"caption": "two"}', "k/1.png": PNG},
    )
    tar(tmp_path / "2.tar", {"k/0.jpg": RED, "k/0.txt": "three", "k/0.cls": "7"})
    assert read_images(tmp_path) == [("one", RED, 1), ("two", PNG, 2), ("three", RED, 3)]
    assert read_images(tmp_path / "2.tar") == [("three", RED, 1)]


def test_every_invalid_row_is_named_with_its_line_and_reason(tmp_path: Path) -> None:
    outside = folder(tmp_path / "outside", {"secret.png": PNG})
    data = folder(
        tmp_path / "data",
        {"good.png": PNG, "cut.png": PNG[:50], "tiny.png": encoded(size=(1, 1)), "text.png": "hello"},
    )
    (data / "link.png").symlink_to(outside / "secret.png")
    (data / "linked").symlink_to(outside)
    rows: list[dict[str, object]] = [
        {"file_name": "good.png", "text": "fine"},
        {"file_name": "cut.png", "text": "x"},
        {"file_name": "tiny.png", "text": "x"},
        {"file_name": "text.png", "text": "x"},
        {"file_name": "good.png", "text": "  "},
        {"file_name": "good.png"},
        {"text": "x"},
        {"file_name": "gone.png", "text": "x"},
        {"file_name": str(outside / "secret.png"), "text": "x"},
        {"file_name": "../outside/secret.png", "text": "x"},
        {"file_name": "link.png", "text": "x"},
    ]
    (data / "metadata.jsonl").write_text(lines(*rows))
    problems = problem(data).splitlines()
    assert "10 of 11 rows cannot be used" in problems[0]
    reasons = [
        "line 2: cut.png: a broken image",
        "line 3: tiny.png: 1 x 1 pixels, but the shorter side must have at least 8",
        "line 4: text.png: not an image",
        "line 5: good.png: the caption `text` is empty",
        "line 6: good.png: no caption",
        "line 7: no image: `file_name` or `image` is missing",
        "line 8: gone.png: there is no such file",
        f"line 9: {outside / 'secret.png'}: a path that leads outside",
        "line 10: ../outside/secret.png: a path that leads outside",
        "line 11: link.png: a link that leads outside",
    ]
    for line, reason in zip(problems[1:], reasons, strict=False):
        assert line.strip().startswith(reason)
    (data / "metadata.jsonl").write_text(
        lines({"image": "linked/secret.png", "text": "x"}, {"image": ".", "text": "x"})
    )
    problems = problem(data).splitlines()
    assert "linked/secret.png: a link that leads outside" in problems[1]
    assert ".: cannot be read (Is a directory)" in problems[2]


def test_missing_caption_files_and_links_out_of_the_folder_are_named(tmp_path: Path) -> None:
    secret = folder(tmp_path / "outside", {"secret.txt": "a password"}) / "secret.txt"
    data = folder(tmp_path / "data", {"a.png": PNG, "b.png": PNG, "c.png": PNG, "c.txt": b"\xff\xfe"})
    (data / "b.txt").symlink_to(secret)
    warnings = problem(data)
    assert "image 1: a.png: no caption: a.txt does not exist" in warnings
    assert "image 2: b.txt: a link that leads outside" in warnings
    assert "image 3: c.txt: cannot be read" in warnings
    assert "a password" not in warnings


def test_invalid_members_of_tar_files_are_named(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "s.tar",
        {"0.jpg": RED, "1.txt": "no image", "2.png": PNG[:50], "2.txt": "x", "3.jpg": RED, "3.json": "{"},
    )
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("4.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    warnings = problem(path)
    assert "image 1: s.tar/0: no caption (.txt or .json)" in warnings
    assert "image 2: s.tar/1: no image" in warnings
    assert "image 3: s.tar/2.png: a broken image" in warnings
    assert "image 4: s.tar/3: its caption cannot be read" in warnings
    assert "image 5: s.tar/4.png: a link, a device" in warnings
    path.write_bytes(path.read_bytes()[: 512 + len(RED) // 2])
    assert "s.tar: a broken archive" in problem(path)


def test_conversions_of_images_are_summarized_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path, {"a.png": encoded("RGBA"), "b.jpg": encoded("CMYK", kind="JPEG"), "c.png": PNG})
    folder(tmp_path, {f"{name}.txt": name for name in "abc"})
    pictures = list(read(tmp_path, min_side=8))
    assert [picture.image == PNG for picture in pictures] == [False, False, True]
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        f"Dataset {tmp_path}: 2 images were changed: 1 from CMYK, 1 transparency replaced by white"
    ]
