"""Measure the longest silence of each flow on a terminal.

    python -m benchmarks.silences                 # ten minutes; writes benchmarks/results/silences.*
    python -m benchmarks.silences --only sft      # flows whose name contains this; writes no file

Each flow runs on this machine in its own folder. Any output of the command ends a silence, including lines of
Metaflow.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
GOAL_S = 15.0  # goal
LIMIT_S = 900.0  # time limit of one flow
SHORT = ("--max-steps", "60")
SCORE = ("--score", f"{ROOT / 'examples' / 'short_answers.py'}:short_answers")
FLOWS: dict[str, tuple[str, ...]] = {
    "sft": ("run", *SHORT),
    "sft, lora, deepspeed": ("run", "--method", "lora", "--engine", "deepspeed", *SHORT),
    "sft, two nodes": ("run", "--nodes", "2", "--engine", "fsdp2", *SHORT),
    "dpo, lora": ("run", "--task", "dpo", "--method", "lora", *SHORT),
    "images, lora": ("run", "--model", "tiny-sdxl", "--method", "lora", "--max-steps", "20"),
    "rejection": ("flow", "rejection", "run", *SCORE, "--set", "rejection.prompts=40", *SHORT),
    "checklist": ("check",),
}


@dataclass(frozen=True, kw_only=True)
class Silence:
    """One run of a flow; its longest time without output, from the command on."""

    flow: str
    status: int
    seconds: float
    longest_seconds: float
    after: str
    """Line before the longest silence, without Metaflow's prefix; "" at the beginning."""


def listen(flow: str, arguments: tuple[str, ...], folder: Path) -> Silence:
    """Run ``finetune`` with these arguments in a folder. Raises TimeoutError after LIMIT_S."""
    command = [sys.executable, "-m", "estimator.cli.app", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "METAFLOW_USER": "tester"}
    start = last_output = time.monotonic()
    longest, after, line = 0.0, "", ""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as output:
            output.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not output.select(max(0.0, start + LIMIT_S - time.monotonic())):
                    raise TimeoutError(f"{flow} has not ended within {LIMIT_S:.0f} s; last line: {line}")
                text = os.read(process.stdout.fileno(), 65536)
                now = time.monotonic()
                if now - last_output > longest:
                    longest, after = now - last_output, line
                last_output = now
                if not text:
                    break
                line = text.decode(errors="replace").strip().rpartition("\n")[2].rpartition(")] ")[2]
        status = process.wait(60)
    finally:
        process.kill()
        process.wait()
    return Silence(
        flow=flow,
        status=status,
        seconds=round(last_output - start, 1),
        longest_seconds=round(longest, 1),
        after=after[:80],
    )


def text(machine: str, found: list[Silence]) -> str:
    """Format the page of results."""
    rows = [
        f"| `{_command(each.flow)}` | {each.status} | {each.seconds:.0f} | {each.longest_seconds:.1f} "
        f"| {each.after.replace('|', '/')} |"
        for each in found
    ]
    return "\n".join(
        [
            "# Silences",
            "",
            f"`python -m benchmarks.silences`, {machine}.",
            "",
            f"No flow should be silent for more than {GOAL_S:.0f} s. The last column is the line before",
            "the longest silence.",
            "",
            "| flow | status | seconds | longest silence, s | after |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _command(flow: str) -> str:
    """Return the command that a user types in a clone."""
    return " ".join(["finetune", *FLOWS[flow]]).replace(f"{ROOT}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    silences = []
    for flow, words in FLOWS.items():
        if only in flow:
            with tempfile.TemporaryDirectory() as folder:
                silences.append(listen(flow, words, Path(folder)))
            print(json.dumps(asdict(silences[-1])), flush=True)
    machine = describe()
    if not only:
        file = RESULTS / "silences.json"
        rows = [asdict(each) for each in silences]
        file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        file.with_suffix(".md").write_text(text(machine["text"], silences))
    sys.exit(any(each.status or each.longest_seconds > GOAL_S for each in silences))


if __name__ == "__main__":
    main()
