"""Check every page of other hosts that the documents link to.

    python .ci/links.py

Exit status 1 if a page is gone: its host is unknown, or responds with 404 or 410. Hosts that refuse, time out
or fail are listed without changing the status, because they may still respond to browsers. Links between the
documents are checked when the site is built.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("*.md", "docs/*.md", "infra/**/*.md", "examples/*.md")
LINK = re.compile(r"\]\((https?://[^)\s]+)\)|(?<![(\w`])(https?://[^\s)>`\"'|]+[^\s)>`\"'|.,;:])")
PARALLEL_REQUESTS = 8
TIMEOUT_S = 20.0
GONE = (404, 410)


def links(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the pages of other hosts, without fragments, each with the documents that link to it."""
    pages: dict[str, list[str]] = {}
    for file in sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)}):
        if "node_modules" in file.parts:
            continue
        for pair in LINK.findall(file.read_text()):
            url = (pair[0] or pair[1]).partition("#")[0]
            if not re.match(r"https?://(localhost|127\.|\[?::1|[\w.-]*example\.)", url):
                documents = pages.setdefault(url, [])
                documents += [name] if (name := str(file.relative_to(root))) not in documents else []
    return pages


def request(url: str) -> tuple[bool, str]:
    """Request a page; return whether it is gone, and the problem ("" if none)."""
    try:
        with urlopen(Request(url, headers={"User-Agent": "links"}), timeout=TIMEOUT_S):  # noqa: S310 - http(s)
            return False, ""
    except HTTPError as error:
        return error.code in GONE, f"status {error.code}"
    except URLError as error:
        return isinstance(error.reason, socket.gaierror), str(error.reason)
    except (OSError, ValueError) as error:  # timeouts, malformed responses
        return False, str(error)


def main(pages: dict[str, list[str]]) -> int:
    """Check all pages, print the problems, and return the exit status."""
    gone_count = 0
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        responses: Iterable[tuple[bool, str]] = pool.map(request, pages)
        for (url, documents), (is_gone, problem) in zip(pages.items(), responses, strict=True):
            gone_count += is_gone
            if problem:
                word = "gone" if is_gone else "unknown"
                print(f"{word}: {url} ({problem}), in {', '.join(documents)}")
    print(f"{len(pages)} pages of other hosts, {gone_count} of them gone")
    return 1 if gone_count else 0


if __name__ == "__main__":
    sys.exit(main(links()))
