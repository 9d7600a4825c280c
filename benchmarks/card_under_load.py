"""Measure a step with a live card on one busy core: age of its page, and time until the step ends.

    python -m benchmarks.card_under_load    # three minutes; writes benchmarks/results/card_under_load.*
    python -m benchmarks.card_under_load --seconds 20 --others 1

The flow, its scheduler and the other processes, which compute without end, are all held to one core. "The
work ends" when the step's own code returns; the step has ended when the scheduler says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import describe
from tests.decorators.conftest import Home

RESULTS = Path(__file__).parent / "results"
LIMIT_S = 300.0  # beyond the step's own seconds, for all else


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run on one core."""

    others: int  # processes that want the core
    work_seconds: float
    pages: int
    longest_without_page_seconds: float  # from the step's begin to the end of its work
    ended_after_seconds: float  # after the step's work had ended


@contextmanager
def on_one_core(others: int) -> Iterator[None]:
    """Hold this process and its children to one core that ``others`` processes share."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spin = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(others)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


def measure(folder: Path, *, seconds: float, busy_processes: int) -> Measurement:
    """Run a step that works for ``seconds`` and look at its card's file and at its log."""
    home = Home(folder)
    (folder / ".metaflow").mkdir()
    pages: list[float] = []
    with on_one_core(busy_processes):
        options = ("--model=llama-8b", "--steps=400", "--of-steps=4000", f"--seconds={seconds}")
        flow = home.start("profiled.py", "run", *options)
        try:
            deadline = time.time() + seconds + LIMIT_S
            ended = None
            while ended is None:
                if time.time() > deadline or flow.poll() not in (None, 0):
                    raise RuntimeError(f"the flow did not end well:\n{_log(home)}")
                pages += [at for at in _pages(folder) if at not in pages]
                if _said(home, "/train/", "Task finished successfully"):
                    ended = time.time()
                time.sleep(0.02)
            if flow.wait(LIMIT_S) != 0:
                raise RuntimeError(f"the flow did not end well:\n{_log(home)}")
        finally:
            flow.kill()
            flow.wait()
    start, work_ended = (
        float(_said(home, "/train/", words).split()[-1]) for words in ("began", "work ended")
    )
    live = [at for at in pages if at <= work_ended]
    moments = [start, *live, work_ended]
    return Measurement(
        others=busy_processes,
        work_seconds=seconds,
        pages=len(live),
        longest_without_page_seconds=max(b - a for a, b in pairwise(moments)),
        ended_after_seconds=ended - work_ended,
    )


def _pages(folder: Path) -> list[float]:
    pages = [*(folder / ".metaflow" / "mf.cards").rglob("blank-finetune-*.html")]
    with suppress(FileNotFoundError):  # replaced this very moment
        return [page.stat().st_mtime for page in pages]
    return []


def _log(home: Home) -> str:
    return (home.path / "output.txt").read_text(errors="replace")


def _said(home: Home, *words: str) -> str:
    """Return the last line of the log that contains all these words; empty if there is none."""
    return next((line for line in _log(home).splitlines() if all(word in line for word in words)), "")


def text(result: Mapping[str, object], rows: list[Measurement]) -> str:
    table = "\n".join(
        f"| {row.others} | {row.work_seconds:.0f} | {row.pages} | {row.longest_without_page_seconds:.1f} "
        f"| {row.ended_after_seconds:.1f} |"
        for row in rows
    )
    return f"""# The card on a loaded core

`{result["command"]}`, {describe()["text"]}; all processes on one core.

| others that compute | seconds of work | pages | longest without a new page, s | ended after its work, s |
|---|---|---|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the step's work")
    parser.add_argument("--others", type=int, action="append", help="processes beside it; default 0, 1 and 3")
    chosen = parser.parse_args()
    rows = []
    for busy_processes in chosen.others or (0, 1, 3):
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(Path(name), seconds=chosen.seconds, busy_processes=busy_processes))
            print(json.dumps(asdict(rows[-1])), flush=True)
    result = {"command": "python -m benchmarks.card_under_load", "machine": describe()}
    if not chosen.others:
        file = RESULTS / "card_under_load.json"
        file.write_text(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
        file.with_suffix(".md").write_text(text(result, rows))
    print(text(result, rows))


if __name__ == "__main__":
    main()
