"""`.ci/links.py`: links that it finds, and its report on dead links."""

from __future__ import annotations

import importlib.util
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.http_server import serving

FILE = Path(__file__).parents[2] / ".ci" / "links.py"
spec = importlib.util.spec_from_file_location("links", FILE)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


class Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/there": 200, "/refused": 403}.get(self.path, 404))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_links_of_documents_are_found_once_without_examples_and_code(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "[a](https://a.org/x#part), bare https://b.org/y. And `https://code.org`, [own](docs/a.md),\n"
        "[no](https://example.com/z), http://localhost:8000/, (https://c.org/w)\n"
    )
    (tmp_path / "docs" / "a.md").write_text("[a again](https://a.org/x)")
    assert script.links(tmp_path) == {
        "https://a.org/x": ["README.md", "docs/a.md"],
        "https://b.org/y": ["README.md"],
    }


def test_a_dead_link_is_reported_with_its_document(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Host) as url:
        pages = {f"{url}/{page}": ["README.md"] for page in ("there", "refused", "moved")}
        assert script.main(pages) == 1
        output = capsys.readouterr().out
        assert f"gone: {url}/moved (status 404), in README.md" in output
        assert f"unknown: {url}/refused (status 403), in README.md" in output
        assert f"{url}/there" not in output
        assert "3 pages of other hosts, 1 of them gone" in output
        assert script.main({f"{url}/refused": ["README.md"]}) == 0


def test_an_unknown_host_is_dead_and_a_closed_port_uncertain() -> None:
    assert script.request("http://no-such-host.invalid/")[0] is True
    closed_port, problem = script.request("http://127.0.0.1:9/")
    assert (closed_port, bool(problem)) == (False, True)
