"""Measure a step with a live card on one busy core: age of its page, and time until the step ends.

    python -m benchmarks.card_under_load    # three minutes; writes benchmarks/results/card_under_load.*
    python -m benchmarks.card_under_load --seconds 20 --others 1

The flow, its scheduler and competing processes that compute without end share one core. The work ends when
the step's code returns; the step ends when the scheduler logs it.
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
LIMIT_S = 300.0  # for start and end, in addition to the step's own seconds


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run on one core."""

    competing_processes: int
    work_seconds: float
    pages: int
    longest_without_page_seconds: float  # from the step's begin to the end of its work
    ended_after_seconds: float  # after the step's work had ended


@contextmanager
def on_one_core(competing_processes: int) -> Iterator[None]:
    """Hold this process and its children to one core, together with busy processes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spin = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(competing_processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


def measure(folder: Path, *, seconds: float, competing_processes: int) -> Measurement:
    """Run a step that works for ``seconds`` and poll its card's file and its log."""
    home = Home(folder)
    (folder / ".metaflow").mkdir()
    pages: list[float] = []
    with on_one_core(competing_processes):
        options = ("--model=llama-8b", "--steps=400", "--of-steps=4000", f"--seconds={seconds}")
        flow = home.start("profiled.py", "run", *options)
        try:
            deadline = time.time() + seconds + LIMIT_S
            ended = None
            while ended is None:
                if time.time() > deadline or flow.poll() not in (None, 0):
                    raise RuntimeError(f"the flow failed:\n{_log(home)}")
                pages += [at for at in _pages(folder) if at not in pages]
                if _last_line(home, "/train/", "Task finished successfully"):
                    ended = time.time()
                time.sleep(0.02)
            if flow.wait(LIMIT_S) != 0:
                raise RuntimeError(f"the flow failed:\n{_log(home)}")
        finally:
            flow.kill()
            flow.wait()
    start, work_ended = (
        float(_last_line(home, "/train/", words).split()[-1]) for words in ("began", "work ended")
    )
    live = [at for at in pages if at <= work_ended]
    moments = [start, *live, work_ended]
    return Measurement(
        competing_processes=competing_processes,
        work_seconds=seconds,
        pages=len(live),
        longest_without_page_seconds=max(b - a for a, b in pairwise(moments)),
        ended_after_seconds=ended - work_ended,
    )


def _pages(folder: Path) -> list[float]:
    pages = [*(folder / ".metaflow" / "mf.cards").rglob("blank-finetune-*.html")]
    with suppress(FileNotFoundError):  # just being replaced
        return [page.stat().st_mtime for page in pages]
    return []


def _log(home: Home) -> str:
    return (home.path / "output.txt").read_text(errors="replace")


def _last_line(home: Home, *texts: str) -> str:
    """Return the last line of the log that contains all these texts; empty without one."""
    return next((line for line in _log(home).splitlines() if all(text in line for text in texts)), "")


def text(result: Mapping[str, object], rows: list[Measurement]) -> str:
    table = "\n".join(
        f"| {row.competing_processes} | {row.work_seconds:.0f} | {row.pages} "
        f"| {row.longest_without_page_seconds:.1f} | {row.ended_after_seconds:.1f} |"
        for row in rows
    )
    return f"""# The card on a loaded core

`{result["command"]}`, {describe()["text"]}; all processes on one core.

| competing processes | seconds of work | pages | longest time without a new page, s | end after its work, s |
|---|---|---|---|---|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the step's work")
    parser.add_argument("--others", type=int, action="append", help="competing processes; default 0, 1 and 3")
    chosen = parser.parse_args()
    rows = []
    for competing_processes in chosen.others or (0, 1, 3):
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(Path(name), seconds=chosen.seconds, competing_processes=competing_processes))
            print(json.dumps(asdict(rows[-1])), flush=True)
    result = {"command": "python -m benchmarks.card_under_load", "machine": describe()}
    if not chosen.others:
        file = RESULTS / "card_under_load.json"
        file.write_text(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
        file.with_suffix(".md").write_text(text(result, rows))
    print(text(result, rows))


if __name__ == "__main__":
    main()
