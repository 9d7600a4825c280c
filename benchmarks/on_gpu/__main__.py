"""Measure memory and speed of training on this machine's GPUs, and compare them with predictions.

    python -m benchmarks.on_gpu [--minutes 20]

Runs the launchers with full training, LoRA and QLoRA on torchtune, DeepSpeed and FSDP2, with packed rows and
rows of many lengths, with longest_first and expandable_segments on and off, on random weights in the shapes
of Llama 3.2 1B, 3B and Llama 3.1 8B: the largest that is planned to fit. Nothing is downloaded. For each
case: live and reserved memory, what NVML shows, tokens/s, and the smallest memory limit on which it still
runs.
Writes a page (.md), rows of measurements (.csv) and all figures (.json), after each case anew.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.on_gpu import cases, checks, page, rows
from benchmarks.on_gpu.session import Clock, Measured, Session
from estimator import models
from estimator.errors import UserError
from estimator.hardware.local_machine import detect
from launchers.base import workdir
from launchers.run.checks import check_installed

RESULTS = Path(__file__).parents[1] / "results"
USER_ERROR_STATUS = 2
INTERRUPTED = 130
CHECKLIST_SHARE = 0.2  # of the time, at most
NO_GPU = (
    "No NVIDIA GPU is seen here (by its driver, NVML): tiny shapes are measured on the CPU only.\n"
    "This tests the benchmark and the estimator's CPU class. It measures nothing on GPUs."
)


def main() -> None:
    """Run ``python -m benchmarks.on_gpu``."""
    options = _options()
    try:
        status = run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        status = USER_ERROR_STATUS
    except KeyboardInterrupt:
        print("ended by Ctrl-C; what was measured until then is written", file=sys.stderr)
        status = INTERRUPTED
    raise SystemExit(status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="the whole, at most (default: 20)")
    parser.add_argument(
        "--model", help="a Llama or Qwen 3 of the model table (default: the largest that fits)"
    )
    parser.add_argument("--only", help="words that a case's name must have: 'lora torchtune packed'")
    parser.add_argument(
        "--resolution", type=float, default=0.02, help="of what a case needs, as a part of what it shows"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page and the rows")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Measure and write; returns the exit status.

    Raises UserError for what the user can mend, and KeyboardInterrupt when the runs are ended.
    """
    _check(options)
    machine = detect(workdir.root())
    scale = cases.ON_GPUS if machine.gpus else cases.ON_CPU
    if not machine.gpus:
        print(NO_GPU, flush=True)
    chosen_cases = cases.chosen(cases.in_order(scale, machine, options.model), options.only)
    clock = Clock(options.minutes)
    with workdir.work_folder("on_gpu", "session", "0") as folder:
        limit_s = 60 * options.minutes * CHECKLIST_SHARE
        checked = checks.check(scale.device, len(machine.gpus), folder, limit_s)
        writer = _Writer(options, scale, checked, clock)
        session = Session(
            scale=scale,
            folder=folder,
            clock=clock,
            resolution=options.resolution,
            say=lambda line: print(line, flush=True),
            keep=writer,
        )
        measured = session.measure(chosen_cases)
    left = sum(bool(each.left_out) for each in measured)
    print(f"{len(measured)} cases, {left} of them left out in part or whole: {writer.page}, {writer.rows}")
    return 0


def _check(options: argparse.Namespace) -> None:
    if not options.minutes > 0:
        raise UserError(f"--minutes {options.minutes:g} is not possible.", "Give a number above 0.")
    if not 0 < options.resolution < 1:
        raise UserError(
            f"--resolution {options.resolution:g} is not possible.", "Give a number such as 0.02."
        )
    for engine in cases.ENGINES:
        check_installed(engine, "qlora")
    if options.model:
        from launchers.models import tiny_llama

        tiny_llama.config_of(models.find(options.model))  # raises for what cannot be made
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {options.out} cannot be made: {error.strerror}.") from None


class _Writer:
    """Rewrites the result files after each case, so that an interrupted session keeps its results."""

    def __init__(
        self, options: argparse.Namespace, scale: cases.Scale, checked: checks.Checked, clock: Clock
    ) -> None:
        self._scale, self._checked, self._clock, self._options = scale, checked, clock, options
        self._machine = describe()
        names = self._machine["gpus"]
        self._place = f"{len(names)}x {names[0]}" if names else "a CPU"
        self._name = "on_gpu_" + (re.sub(r"[^a-z0-9]+", "_", self._place.lower()) if names else "cpu")
        self.page, self.rows = (options.out / f"{self._name}{suffix}" for suffix in (".md", ".csv"))

    def __call__(self, measured: Sequence[Measured]) -> None:
        day = date.today().isoformat()
        heading = page.Heading(
            title=f"What training needs, shows and does on {self._place}",
            command=self._command(),
            machine=self._machine["text"],
            day=day,
            minutes=(time.monotonic() - self._clock.began) / 60,
            resolution=self._options.resolution,
        )
        table = rows.rows(
            measured,
            source=f"benchmarks.on_gpu on {self._place}, {day}",
            prefix=f"{self._name}-{day.replace('-', '')}",
        )
        figures = {
            "command": heading.command,
            "day": day,
            "machine": self._machine,
            "versions": self._checked.versions,
            "cases": [_figures(each) for each in measured],
        }
        self.page.write_text(page.render(heading, measured, self._scale, self._checked))
        self.rows.write_text(rows.as_csv(table))
        self.page.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")

    def _command(self) -> str:
        options = self._options
        words = ["python -m benchmarks.on_gpu", f"--minutes {options.minutes:g}"]
        words += [f"--model {options.model}"] if options.model else []
        words += [f"--only '{options.only}'"] if options.only else []
        return " ".join([*words, f"--resolution {options.resolution:g}"])


def _figures(measured: Measured) -> dict[str, object]:
    """Return all figures of a case, without the plan's text."""

    def without_plan(outcome: object) -> dict[str, object]:
        return {name: value for name, value in outcome.to_dict().items() if name != "plan"}  # type: ignore[attr-defined]

    return {
        "case": measured.case.name,
        "run": without_plan(measured.outcome) if measured.outcome else None,
        "needed_bytes": measured.needed_bytes,
        "trials": [without_plan(trial) for trial in measured.trials],
        "left_out": measured.left_out,
    }


if __name__ == "__main__":
    main()
