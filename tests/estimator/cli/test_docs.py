"""docs/estimate.md shows what the commands print.

``python tests/estimator/cli/test_docs.py --write`` renews the outputs and the table of defaults.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))  # as a script

from estimator.vocabulary import ENGINES  # noqa: E402

PAGE = ROOT / "docs" / "estimate.md"
_EXAMPLE = re.compile(r"^```console\n\$ (finetune .*)\n((?:.*\n)*?)```$", re.MULTILINE)
_DEFAULTS = re.compile(r"(<!-- generated: defaults -->\n).*?(<!-- end -->)", re.DOTALL)


def printed(command: str) -> str:
    """What a command prints on a machine that has never run anything, without trailing spaces."""
    words = shlex.split(command)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    nowhere = str(ROOT / "no-such-folder" / "none")
    done = subprocess.run(
        [sys.executable, "-m", "estimator.cli.app", *words[1:]],
        cwd=ROOT,
        env=kept | {"COLUMNS": "100", "FINETUNE_CALIBRATION": nowhere, "XDG_CACHE_HOME": nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    reported = re.sub(
        r"^Prices of .* days old: .*\n", "", done.stderr, flags=re.MULTILINE
    )  # each day another
    lines = [line.rstrip() for line in (done.stdout + reported).strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def defaults_table() -> str:
    lines = [
        "| Engine | precision | sharding | loss | checkpointing | sequences | LoRA on |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, engine in ENGINES.items():
        row = engine.defaults
        if row is None:
            continue
        cells = (
            f"`{name}`",
            _both(engine.precision_of(sharded=False), engine.precision_of(sharded=True)),
            row.sharding,
            engine.loss,
            _both(row.checkpointing, row.checkpointing_of(sharded=True)),
            "packed" if row.fixed_length else "varying",
            ", ".join(row.lora_targets) if row.lora_targets else "all linear layers",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(alone: str, shared: str) -> str:
    return alone if alone == shared else f"{alone}; {shared} where sharded"


def renewed(text: str) -> str:
    """The page with its outputs and its table as they are now."""
    text = _EXAMPLE.sub(lambda found: f"```console\n$ {found[1]}\n{printed(found[1])}```", text)
    return _DEFAULTS.sub(lambda found: f"{found[1]}\n{defaults_table()}\n\n{found[2]}", text)


@pytest.mark.parametrize("command", [found[1] for found in _EXAMPLE.finditer(PAGE.read_text())])
def test_each_documented_output_is_what_the_command_prints(command: str) -> None:
    shown = next(found[2] for found in _EXAMPLE.finditer(PAGE.read_text()) if found[1] == command)
    assert shown == printed(command), "python tests/estimator/cli/test_docs.py --write"


def test_the_documented_defaults_of_engines_match_the_code() -> None:
    assert defaults_table() in PAGE.read_text(), "python tests/estimator/cli/test_docs.py --write"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/estimator/cli/test_docs.py --write")
    PAGE.write_text(renewed(PAGE.read_text()))
