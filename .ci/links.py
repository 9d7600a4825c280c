"""Asks for every page of other hosts that the documents link to, and says which are gone.

    python .ci/links.py

Status 1 where one is: its host is not known, or it answers 404 or 410. A host that refuses, is slow or fails
is said too, but may be well for people in browsers: status 0. Links inside the documents are checked when
their site is built.
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
ALL_AT_ONCE = 8
ANSWER_S = 20.0
GONE = (404, 410)


def links(root: Path = ROOT) -> dict[str, list[str]]:
    """Each page of another host, without what stands behind "#", and the documents that link to it."""
    found: dict[str, list[str]] = {}
    for file in sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)}):
        if "node_modules" in file.parts:
            continue
        for pair in LINK.findall(file.read_text()):
            url = (pair[0] or pair[1]).partition("#")[0]
            if not re.match(r"https?://(localhost|127\.|\[?::1|[\w.-]*example\.)", url):
                documents = found.setdefault(url, [])
                documents += [name] if (name := str(file.relative_to(root))) not in documents else []
    return found


def ask(url: str) -> tuple[bool, str]:
    """Whether the page is gone, and what is wrong with it: "" for nothing."""
    try:
        with urlopen(Request(url, headers={"User-Agent": "links"}), timeout=ANSWER_S):  # noqa: S310 - http(s)
            return False, ""
    except HTTPError as error:
        return error.code in GONE, f"status {error.code}"
    except URLError as error:
        return isinstance(error.reason, socket.gaierror), str(error.reason)
    except (OSError, ValueError) as error:  # timeouts, broken answers
        return False, str(error)


def main(found: dict[str, list[str]]) -> int:
    """Ask for all of them; the exit status."""
    gone = 0
    with ThreadPoolExecutor(ALL_AT_ONCE) as pool:
        answers: Iterable[tuple[bool, str]] = pool.map(ask, found)
        for (url, documents), (is_gone, problem) in zip(found.items(), answers, strict=True):
            gone += is_gone
            if problem:
                word = "gone" if is_gone else "not sure"
                print(f"{word}: {url} ({problem}), in {', '.join(documents)}")
    print(f"{len(found)} pages of other hosts, {gone} of them gone")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main(links()))
