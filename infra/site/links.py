"""A hook of mkdocs: links that leave docs/ lead to the repository, as on the pages that it shows itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(\.\./([^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """The page with such links made whole. Raises FileNotFoundError for what isn't in the repository."""
    root = Path(config.config_file_path).parent

    def whole(match: re.Match[str]) -> str:
        path = root / match[1]
        if not path.exists():
            raise FileNotFoundError(f"a page links to ../{match[1]}, which is not there")
        kind = "tree" if path.is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{match[1]}{match[2] or ''})"

    return _LINK.sub(whole, markdown)
