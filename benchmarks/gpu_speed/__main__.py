"""Measure training speed on one GPU, and that of other trainers.

    python -m benchmarks.gpu_speed [--minutes 8]

Random weights in the shapes of Llama 3.1 8B and Qwen3 1.7B, 2,048 and 8,192 tokens, LoRA, full training and
QLoRA: by this package's engines, each with its defaults, and in the same call by transformers' Trainer, TRL's
SFTTrainer and torchtune's own command line. Nothing is downloaded. First a matrix product and the equality of
variable-length attention and the mask are measured. Results are written after each run; a later call on the
same kind of card measures what is missing, and runs that failed last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_speed import cases, page, predicted
from benchmarks.gpu_speed.cases import Run
from benchmarks.gpu_speed.session import SETUP_S, Results, Session, expected_s, runs_within
from benchmarks.gpu_speed.suites import H100, SUITES, Suite, suite_of
from benchmarks.machine import describe
from benchmarks.on_gpu.session import Clock
from estimator.errors import UserError
from estimator.hardware.local_machine import detect
from estimator.job import Target
from launchers.base import workdir
from launchers.cluster.processes import sigterm_raises

RESULTS = Path(__file__).parents[1] / "results"
NAME = "gpu_speed"
PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "trl", "torchtune", "torchao", "deepspeed"),
    *("bitsandbytes", "liger-kernel", "triton"),
)
USER_ERROR_STATUS, INTERRUPTED = 2, 130


def main() -> None:
    """Run ``python -m benchmarks.gpu_speed``."""
    options = _options()
    try:
        with sigterm_raises():
            status = run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        status = USER_ERROR_STATUS
    except KeyboardInterrupt:
        print("interrupted; results until then are written", file=sys.stderr)
        status = INTERRUPTED
    raise SystemExit(status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_speed",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the whole (default: 8)")
    parser.add_argument("--suite", choices=SUITES, default="speed", help="runs to measure (default: speed)")
    parser.add_argument("--only", help="words of a run's name: 'llama-3.1-8b lora fsdp2'")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, on any machine")
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="write the page of earlier results again, with today's predictions; measures nothing",
    )
    parser.add_argument("--tiny", action="store_true", help="rehearse every run with tiny-llama on the CPU")
    parser.add_argument("--profile", metavar="RUN", help="profile one step of the run with these words")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Measure and write; returns the exit status."""
    machine = describe()
    measures_here = bool(machine["gpus"]) or options.tiny
    target = Target(machine=detect()) if measures_here else H100
    suite = suite_of(options.suite, is_tiny=options.tiny, target=target)
    name = [] if options.suite == "speed" else [options.suite]
    path = options.out / f"{'_'.join([NAME, *name, *(['tiny'] if options.tiny else [])])}.json"
    if options.rewrite:
        return _rewrite(path, suite)
    card = "CPU" if options.tiny else (machine["gpus"] or [""])[0]
    path = _of_card(path, card)
    results = Results.load(path, card)
    durations = {} if options.tiny else Results.of_any_card(RESULTS / f"{NAME}.json").outcomes
    session = partial(Session, suite=suite, target=target, durations=durations, results=results)
    if options.dry_run:
        return _dry_run(cases.chosen(suite.runs, options.only), session, options)
    if not card:
        raise UserError(
            "No NVIDIA GPU is found by its driver (NVML).",
            "Use --dry-run or --tiny on a machine without one.",
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if options.tiny else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if options.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of tiny products wait for each other
    options.out.mkdir(parents=True, exist_ok=True)
    heading = page.Heading(
        title=suite.title,
        command=" ".join(
            [
                "python -m benchmarks.gpu_speed",
                *(f"--suite {each}" for each in name),
                *(["--tiny"] if options.tiny else []),
            ]
        ),
        day=date.today().isoformat(),
        processor=machine["processor"],
        versions=_versions(),
    )
    with workdir.work_folder(NAME, "session", "0") as folder:
        measuring = session(
            folder=folder,
            clock=Clock(options.minutes),
            say=lambda line: print(line, flush=True),
            keep=lambda: _write(path, suite, results, heading),
        )
        if options.profile:
            for line in measuring.profile(cases.chosen(suite.runs, options.profile)[0]):
                print(line)
            return 0
        measuring.measure(cases.chosen(suite.runs, options.only))
    done = sum(map(results.is_done, suite.runs))
    print(f"{done} of {len(suite.runs)} runs are measured: {path.with_suffix('.md')}")
    return 0


def _of_card(path: Path, card: str) -> Path:
    """Return the file of a card's results: ``path``, or a separate one if it has those of another card."""
    if not card or Results.of_any_card(path).card in ("", card):
        return path
    return path.with_stem(f"{path.stem}_{re.sub('[^a-z0-9]+', '_', card.lower())}")


def _write(path: Path, suite: Suite, results: Results, heading: page.Heading) -> None:
    path.write_text(json.dumps(page.figures(suite, results, heading), indent=1) + "\n")
    path.with_suffix(".md").write_text(page.render(suite, results, heading))


def _rewrite(path: Path, suite: Suite) -> int:
    """Write the pages of earlier results, of all cards, with today's predictions."""
    if not path.is_file():
        raise UserError(f"{path} does not exist, so there are no results to write again.", "Measure first.")
    for file in (path, *path.parent.glob(f"{path.stem}_nvidia_*.json")):
        stored = json.loads(file.read_text())
        heading = page.Heading(
            title=suite.title, **{name: stored[name] for name in ("command", "day", "processor", "versions")}
        )
        _write(file, suite, Results.load(file, stored["card"]), heading)
        print(f"written: {file.with_suffix('.md')}")
    return 0


def _versions() -> dict[str, str]:
    """Return the versions of installed packages that affect the speed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _dry_run(runs: Sequence[Run], session: Callable[..., Session], options: argparse.Namespace) -> int:
    """Print what a call would do."""
    about = session(folder=Path(), clock=Clock(0), say=print, keep=lambda: None)
    scale, results = about.suite.scale, about.results
    missing = [name for name in PACKAGES if name not in _versions()]
    tokens = "one sequence" if scale.one_sequence else f"{scale.tokens * scale.accumulation:,} tokens"
    reasons = {run: predicted.refusal(run, scale, about.target) for run in runs}
    to_run = [run for run in runs if reasons[run] is None and not results.is_done(run)]
    outcomes = {**about.durations, **results.outcomes}
    count = runs_within(options.minutes, to_run, outcomes)
    print(f"{len(runs)} runs of {scale.steps} steps of {tokens}, in this order")
    print(f"until {options.minutes:g} minutes are over; results: {options.out}")
    print(
        f"about {count} of them fit in {options.minutes:g} minutes, with {SETUP_S:.0f} s for probes and "
        "weights (assumed), and the measured durations of such runs"
    )
    print(f"not installed, left out: {', '.join(missing) or 'nothing'}")
    for run in runs:
        if results.is_done(run):
            state = "measured"
        elif reasons[run] is not None:
            state = f"left out: {reasons[run]}"
        else:
            state = f"about {expected_s(run, outcomes):.0f} s"
        print(f"  {run.name} ({state})")
    return 0


if __name__ == "__main__":
    main()
