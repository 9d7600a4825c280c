"""version=VERSION of pyproject.toml; with a tag, only where they agree and CHANGELOG.md has that version.

python .ci/version.py v1.2.3
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str = "") -> str:
    """The line for GitHub's outputs; ends the program in a line where tag and version differ."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if tag:
        if tag != f"v{version}":
            sys.exit(f"The tag is {tag}, and pyproject.toml has version {version}: it must be v{version}.")
        if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
            sys.exit(f"CHANGELOG.md has no heading ## [{version}].")
    return f"version={version}"


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
