"""docs/backends.md lists every check that can refuse a run, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = ROOT / "decorators/backends"
CHECKS = ("preflight", "nodes", "rules", "priority", "queues", "images")


@pytest.mark.parametrize(
    ("backend", "files", "raised"),
    [
        ("Kubernetes", tuple(f"kubernetes/{n}.py" for n in CHECKS), {"API"}),
        ("AWS Batch", ("batch/preflight.py",), {"credentials", "metadata"}),
    ],
)
def test_every_refusal_is_in_the_page(backend: str, files: tuple[str, ...], raised: set[str]) -> None:
    code = "\n".join((OURS / name).read_text() for name in files)
    refusals = set(re.findall(r'findings\.no\(\s*"([a-z ]+)"', code))
    assert len(refusals) >= 3
    page = (ROOT / "docs/backends.md").read_text()
    table = page.split(f"| {backend} | Refused where |\n|---|---|\n")[1].split("\n\n")[0]
    rows = {line.split("|")[1].strip() for line in table.splitlines()}
    assert rows == refusals | raised
