"""Measure training speed on one GPU, and that of other trainers.

    python -m benchmarks.gpu_speed [--minutes 8]

Random weights in the shapes of Llama 3.1 8B and Llama 3.2 1B, 2,048 and 8,192 tokens, LoRA, full training and
QLoRA: by this package's engines, and in the same call by transformers' Trainer, TRL's SFTTrainer and
torchtune's own command line. Nothing is downloaded. First a matrix product and the equality of
variable-length attention and the mask are measured. Results are written after each run; a later call on the
same kind of card measures what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gpu_speed import cases, page
from benchmarks.gpu_speed.cases import Run
from benchmarks.gpu_speed.session import Results, Session
from benchmarks.gpu_speed.suites import H100, SUITES, Suite, suite_of
from benchmarks.machine import describe
from benchmarks.on_gpu.session import Clock
from estimator.errors import UserError
from estimator.hardware.local_machine import detect
from estimator.job import Target
from launchers.base import workdir

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
    parser.add_argument("--tiny", action="store_true", help="rehearse every run with tiny-llama on the CPU")
    parser.add_argument("--profile", metavar="RUN", help="profile one step of the run with these words")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Measure and write; returns the exit status."""
    machine = describe()
    target = Target(machine=detect(), nodes=1, gpus=1) if machine["gpus"] and not options.tiny else H100
    suite = suite_of(options.suite, is_tiny=options.tiny, target=target)
    runs = suite.runs
    card = "CPU" if options.tiny else (machine["gpus"] or [""])[0]
    parts = [
        NAME,
        *([options.suite] if options.suite != "speed" else []),
        *(["tiny"] if options.tiny else []),
    ]
    path = options.out / f"{'_'.join(parts)}.json"
    results = Results.load(path, card)
    if options.dry_run:
        return _dry_run(cases.chosen(runs, options.only), results, suite, options)
    if not card:
        raise UserError(
            "No NVIDIA GPU is found by its driver (NVML).",
            "Use --dry-run or --tiny on a machine without one.",
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if options.tiny else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    options.out.mkdir(parents=True, exist_ok=True)
    heading = page.Heading(
        title=suite.title,
        command="python -m benchmarks.gpu_speed"
        + (f" --suite {options.suite}" if options.suite != "speed" else "")
        + (" --tiny" if options.tiny else ""),
        day=date.today().isoformat(),
        processor=machine["processor"],
        versions=_versions(),
    )

    def keep() -> None:
        path.write_text(json.dumps(page.figures(runs, results, heading), indent=1) + "\n")
        path.with_suffix(".md").write_text(page.render(runs, results, heading))

    with workdir.work_folder(NAME, "session", "0") as folder:
        session = Session(
            suite=suite,
            folder=folder,
            clock=Clock(options.minutes),
            results=results,
            say=lambda line: print(line, flush=True),
            keep=keep,
        )
        if options.profile:
            for line in session.profile(cases.chosen(runs, options.profile)[0]):
                print(line)
            return 0
        session.measure(cases.chosen(runs, options.only))
    print(f"{sum(map(results.is_done, runs))} of {len(runs)} runs are measured: {path.with_suffix('.md')}")
    return 0


def _versions() -> dict[str, str]:
    """Return the versions of installed packages that affect the speed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _dry_run(runs: Sequence[Run], results: Results, suite: Suite, options: argparse.Namespace) -> int:
    """Print what a call would do."""
    missing = [name for name in PACKAGES if name not in _versions()]
    scale = suite.scale
    tokens = "one sequence" if scale.one_sequence else f"{scale.tokens * scale.accumulation:,} tokens"
    print(f"{len(runs)} runs of {scale.steps} steps of {tokens}, in this order")
    print(f"until {options.minutes:g} minutes are over; results: {options.out}")
    print(f"not installed, left out: {', '.join(missing) or 'nothing'}")
    for run in runs:
        print(f"  {run.name}{' (measured)' if results.is_done(run) else ''}")
    return 0


if __name__ == "__main__":
    main()
