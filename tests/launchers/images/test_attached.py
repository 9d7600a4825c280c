"""Images in chats: every supported format, and errors that name the row before training."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

from estimator.errors import UserError  # noqa: E402
from launchers.dataset import rows, stored  # noqa: E402
from launchers.dataset.turns import IMAGE  # noqa: E402
from launchers.images import attached  # noqa: E402
from launchers.images.attached import Reader  # noqa: E402

ANSWER = {"role": "assistant", "content": "Red."}


def png(color: str = "red", side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), color).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")
BOTH = ["img/red.png", "img/blue.png"]
URL = "data:image/png;base64," + base64.b64encode(RED).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "red.png").write_bytes(RED)
    (tmp_path / "img" / "blue.png").write_bytes(BLUE)
    return tmp_path


def read(folder: Path, *values: Any, fetches: bool = False) -> list[rows.Conversation]:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(rows.read(path, images=Reader(folder=folder, fetches=fetches)))


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


TEXT = {"type": "text", "text": "Color?"}


@pytest.mark.parametrize(
    ("row", "content", "images"),
    [
        (chat({"type": "image_url", "image_url": {"url": URL}}, TEXT), IMAGE + "Color?", [RED]),
        (chat(TEXT, {"type": "image_url", "image_url": URL}), "Color?" + IMAGE, [RED]),
        (chat({"type": "image", "image": "img/red.png"}, TEXT), IMAGE + "Color?", [RED]),
        (chat({"type": "image", "path": "img/blue.png"}, TEXT), IMAGE + "Color?", [BLUE]),
        (chat({"type": "image", "base64": URL.partition(",")[2]}, TEXT), IMAGE + "Color?", [RED]),
        (
            chat({"type": "image"}, TEXT, {"type": "image"}) | {"images": BOTH},
            IMAGE + "Color?" + IMAGE,
            [RED, BLUE],
        ),
        (
            {"prompt": "Is <image> like <image>?", "completion": "No.", "images": BOTH},
            f"Is {IMAGE} like {IMAGE}?",
            [RED, BLUE],
        ),
        (
            {"prompt": "Color?", "completion": "Red.", "image": {"path": "img/red.png", "bytes": None}},
            IMAGE + "Color?",
            [RED],
        ),
        (
            {"prompt": [{"role": "user", "content": "Color?"}], "completion": [ANSWER], "images": [URL, URL]},
            IMAGE * 2 + "Color?",
            [RED, RED],
        ),
        ({"prompt": "Hi", "completion": "<image>"}, "Hi", []),
    ],
)
def test_images_are_read_in_every_format_in_the_order_of_their_placeholders(
    folder: Path, row: dict[str, Any], content: str, images: list[bytes]
) -> None:
    (conversation,) = read(folder, row)
    assert conversation.messages[0].content == content
    assert list(conversation.images) == images
    assert stored.decode(stored.encode(conversation)) == conversation


def test_encoded_images_of_a_table_are_read(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = {"images": [[{"bytes": BLUE, "path": None}]], "prompt": ["Color?"], "completion": ["Blue."]}
    parquet.write_table(pyarrow.table(values), folder / "d.parquet")
    (conversation,) = rows.read(folder / "d.parquet", images=Reader(folder=folder))
    assert conversation.images == (BLUE,)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (chat({"type": "image", "image": "img/none.png"}), "image 1: img/none.png: there is no such file"),
        (chat({"type": "image", "image": "../x.png"}), "outside of"),
        (chat({"type": "image", "image": "/etc/hosts"}), "outside of"),
        (chat({"type": "image", "image": "d.jsonl"}), "image 1: not an image that can be read"),
        (chat({"type": "image_url", "image_url": URL[:-40]}), "image 1: a broken image"),
        (chat({"type": "image_url", "image_url": "data:image/png;base64,%%"}), "image 1: broken base64"),
        (chat({"type": "image", "image": 5}), "neither a path, a URL nor an image, but int"),
        (chat({"type": "image"}, TEXT), "1 places for images, but no `images`"),
        (
            {"prompt": "<image> or <image>?", "completion": "No.", "images": [URL]},
            "2 places for images, but `images` has 1",
        ),
        (
            chat({"type": "image", "image": URL}, {"type": "image"}) | {"images": [URL]},
            "images both in the messages and in `images`",
        ),
        (
            {"prompt": "Draw.", "completion": "<image>", "images": [URL]},
            "an image in a turn that is not the user's",
        ),
        ({"prompt": "Hi", "completion": "No.", "images": [URL] * 65}, "65 images; at most 64"),
    ],
)
def test_a_bad_image_is_refused_with_its_row(folder: Path, row: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        read(folder, chat(TEXT), row)
    assert "line 2: " in error.value.problem
    assert expected in error.value.problem
    assert "\n" not in error.value.problem


def test_an_image_with_too_many_bytes_or_pixels_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = chat({"type": "image", "image": "img/red.png"})
    with monkeypatch.context() as patched:
        patched.setattr(attached, "MAX_BYTES", len(RED) - 1)
        with pytest.raises(UserError, match=r"line 1: image 1: img/red\.png: more than"):
            read(folder, row)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(UserError, match="more than 20 pixels"):
        read(folder, row)


def test_rows_with_images_are_recognized(folder: Path) -> None:
    for row, expected in (
        (chat(TEXT), False),
        (chat({"type": "image"}), True),
        ({"images": []}, False),
        ({"picture": URL}, True),
    ):
        (folder / "d.jsonl").write_text(json.dumps(row) + "\n")
        assert attached.has_images(folder / "d.jsonl", {"image": "picture"}) == expected


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/red.png" else 404)
        self.end_headers()
        self.wfile.write(RED if self.path == "/red.png" else b"")

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    listening = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    thread.join()


def test_image_urls_are_fetched_only_while_data_is_prepared(
    folder: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = chat({"type": "image_url", "image_url": f"{server}/red.png"})
    assert read(folder, row)[0].images == (b"",)
    with pytest.raises(UserError, match=r"127\.0\.0\.1 is not a public address"):
        read(folder, row, fetches=True)
    public = attached._check_public
    monkeypatch.setattr(
        attached, "_check_public", lambda url: None if url.startswith(server) else public(url)
    )
    assert read(folder, row, fetches=True)[0].images == (RED,)
    for path, said in (("none.png", "the server answers 404"), ("moved", "is not a public address")):
        with pytest.raises(UserError, match=said):
            read(folder, chat({"type": "image_url", "image_url": f"{server}/{path}"}), fetches=True)
    monkeypatch.setattr(attached, "MAX_BYTES", 10)
    with pytest.raises(UserError, match="11 bytes, more than 10"):
        read(folder, row, fetches=True)
