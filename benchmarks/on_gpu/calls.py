"""Everything to measure on a GPU that is available for minutes, in order.

    python -m benchmarks.on_gpu.calls --minutes 9 --out "$OUT" --earlier benchmarks/results
    python -m benchmarks.on_gpu.calls --out "$OUT" --dry-run    # the commands, on any machine
    python -m benchmarks.on_gpu.calls --out "$OUT" --tiny       # rehearse each on the CPU

Each command has a time limit and writes its results to ``--out``. ``--earlier`` is a folder with results of
earlier calls: they are copied to ``--out`` first, and what they have is not measured again; commands that
failed or were ended are repeated. To keep the results, copy the files of ``--out`` to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.on_gpu.session import Clock
from estimator.errors import UserError
from launchers.cluster.processes import sigterm_raises

ROOT = Path(__file__).parents[2]
RECORD = "gpu_calls.json"  # commands, exit statuses and seconds
LOGS = "gpu_calls"  # folder of the commands' output
SHORTEST_MIN = 1.0  # a command is not started with less time
ENDING_S = 30.0  # for a command to end its processes
CHECKLIST = ("checklist", "--nodes", "1", "--profile", "standard", "--skip", "datastore,storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One command. ``{minutes}`` and ``{out}`` in its arguments are replaced."""

    name: str
    question: str
    module: tuple[str, ...]  # name and arguments of a module
    minutes: float  # time limit on a GPU
    tiny: tuple[str, ...] = ("--tiny",)  # arguments that rehearse it on the CPU
    continues: bool = False  # whether the command skips what its results have, so that it is always run
    measured: tuple[int, ...] = (0,)  # exit statuses after which it is not repeated
    nccl: bool = False  # takes --nccl

    def command(self, options: argparse.Namespace, minutes: float) -> list[str]:
        """Return the command for a time limit."""
        words = [*self.module, *(self.tiny if options.tiny else ())]
        if self.nccl and options.nccl is not None and not options.tiny:
            words += ["--nccl", str(options.nccl)]
        values = {"minutes": f"{minutes:.1f}", "out": str(options.out)}
        return [sys.executable, "-m", *(word.format(**values) for word in words)]


def _measuring(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments of a benchmark with a time limit and a folder of results."""
    return (f"benchmarks.{module}", *arguments, "--minutes", "{minutes}", "--out", "{out}")


def _shared(name: str, question: str, minutes: float) -> Call:
    return Call(
        name=f"shared {name}",
        question=question,
        module=_measuring("on_gpu.shared", "--only", name),
        minutes=minutes,
        continues=True,
        tiny=("--device", "cpu"),
        nccl=True,
    )


CALLS = (
    Call(
        name="speed",
        question="How fast is each engine next to other trainers?",
        module=_measuring("gpu_speed"),
        continues=True,
        minutes=8,
    ),
    Call(
        name="checklist",
        question="Is the GPU healthy?",
        module=(*CHECKLIST, "--json", "{out}/checklist.json"),
        minutes=3,
        tiny=("--device", "cpu", "--gpus-per-node", "2", "--profile", "quick"),
        measured=(0, 1, 3),  # PASS, FAIL, NO-VERDICT
    ),
    _shared("checklist", "Does NCCL work between two ranks?", 2),
    _shared("train", "Are losses of two ranks those of one?", 4),
    _shared("hosts", "Are slow, lossy, hung and dead ranks named with NCCL? As root", 8),
    Call(
        name="tasks",
        question="Do preference tasks, reward model and GRPO run?",
        module=_measuring("gpu_speed", "--suite", "tasks"),
        continues=True,
        minutes=4,
    ),
    Call(
        name="images",
        question="Does SDXL LoRA run, and in which memory?",
        module=_measuring("on_gpu.images"),
        minutes=5,
    ),
    Call(
        name="varying",
        question="What do rows of varying length need?",
        module=(
            *("benchmarks.on_gpu", "--only", "qlora fsdp2 varying"),
            *("--minutes", "{minutes}", "--out", "{out}/varying"),
        ),
        minutes=4,
        tiny=("--resolution", "0.2"),  # fewer runs per case
    ),
    Call(
        name="recompute",
        question="What does selective recomputation need?",
        module=_measuring("gpu_speed", "--suite", "recompute", "--only", "lora"),
        continues=True,
        minutes=5,
    ),
    Call(
        name="small",
        question="How fast are small models?",
        module=_measuring("gpu_speed", "--suite", "small"),
        continues=True,
        minutes=4,
    ),
    Call(
        name="launches",
        question="How many kernels does a step of a small model launch?",
        module=_measuring("gpu_speed", "--suite", "small", "--profile", "lora eager"),
        minutes=2,
    ),
    Call(
        name="longest",
        question="What is the longest sequence of 8B LoRA?",
        module=_measuring("gpu_speed", "--suite", "longest", "--only", "lora"),
        continues=True,
        minutes=5,
    ),
    Call(
        name="vllm",
        question="Do vLLM's sampler and `finetune serve` work?",
        module=_measuring("on_gpu.vllm"),
        minutes=4,
    ),
)


def table() -> str:
    """Build the table of docs/measure-gpu.md."""
    lines = ["| Name | Question | Command | Minutes |", "|---|---|---|---:|"]
    for call in CALLS:
        words = [word.format(minutes=f"{call.minutes:g}", out="$OUT") for word in call.module]
        shown = " ".join(f"'{word}'" if " " in word else word for word in words)
        nccl = " --nccl libnccl.so.2" if call.nccl else ""
        lines.append(f"| {call.name} | {call.question} | `python -m {shown}{nccl}` | {call.minutes:g} |")
    return "\n".join(lines)


def chosen(only: str | None) -> list[Call]:
    """Select the commands with these names, separated by commas. Raises UserError for an unknown name."""
    if only is None:
        return list(CALLS)
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in {call.name for call in CALLS}]
    if unknown:
        raise UserError(
            f"--only {unknown[0]}: there is no such command.",
            f"Choose from: {', '.join(call.name for call in CALLS)}.",
        )
    return [call for call in CALLS if call.name in names]


def run(call: Call, options: argparse.Namespace, minutes: float) -> dict[str, Any]:
    """Run a command, end it and its processes at the limit, and return what happened."""
    command = call.command(options, minutes)
    log = options.out / LOGS / f"{call.name.replace(' ', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    unfinished = log.with_suffix(".unfinished.txt")
    begin = time.monotonic()
    with unfinished.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):  # commands keep to the limit, except of their last run
                process.wait(60 * minutes + ENDING_S)
        finally:
            _end(process)
    if process.returncode == 0:
        unfinished.replace(log)
    return {
        "name": call.name,
        "tiny": options.tiny,
        "command": shlex.join(command),
        "status": process.returncode,
        "seconds": round(time.monotonic() - begin, 1),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its processes: SIGTERM, on which it keeps its results; then SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)


def measure(calls: Sequence[Call], options: argparse.Namespace) -> int:
    """Run the commands while time remains; returns the number of those that failed."""
    clock = Clock(options.minutes)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.earlier is not None:
        _copy_missing(options.earlier, options.out)
    record = options.out / RECORD
    rows: list[dict[str, Any]] = json.loads(record.read_text())["calls"] if record.is_file() else []
    failed = 0
    for call in calls:
        if not call.continues and any(_measured(call, row, options) for row in rows):
            print(f"{call.name}: measured before", flush=True)
            continue
        minutes = min(call.minutes if not options.tiny else options.minutes, clock.left_s / 60)
        if minutes < SHORTEST_MIN:
            print(f"{call.name}: no time left", flush=True)
            continue
        row = run(call, options, minutes)
        failed += row["status"] != 0
        rows.append(row)
        record.write_text(json.dumps({"machine": describe(), "calls": rows}, indent=1) + "\n")
        print(f"{call.name}: status {row['status']} ({row['seconds']:.0f} s)", flush=True)
    return failed


def _measured(call: Call, row: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a row of the record is this command, with its results, on this kind of device."""
    same = (row["name"], row.get("tiny")) == (call.name, options.tiny)
    return same and row["status"] in call.measured


def _copy_missing(source: Path, destination: Path) -> None:
    """Copy files that the destination lacks. Raises UserError if the source is no folder."""
    if not source.is_dir():
        raise UserError(
            f"--earlier {source} is not a folder.", "Give the folder of an earlier call's results."
        )
    for path in source.rglob("*"):
        copy = destination / path.relative_to(source)
        if path.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu.calls",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole (default: 9)")
    parser.add_argument("--only", help="names of commands, separated by commas: 'speed,tasks'")
    parser.add_argument("--nccl", type=Path, help="NCCL library of benchmarks.on_gpu.shared")
    parser.add_argument("--earlier", type=Path, help="folder of an earlier call's results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, on any machine")
    parser.add_argument("--tiny", action="store_true", help="rehearse the commands on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    return parser


def main() -> None:
    """Run ``python -m benchmarks.on_gpu.calls``."""
    options = _parser().parse_args()
    options.out = options.out.absolute()
    try:
        calls = chosen(options.only)
        if options.dry_run:
            for call in calls:
                print(f"{call.name} (at most {call.minutes:g} minutes): {call.question}")
                print(f"  {shlex.join(call.command(options, call.minutes))}")
            return
        if not (options.tiny or describe()["gpus"]):
            raise UserError("No NVIDIA GPU is found by its driver (NVML).", "Use --dry-run or --tiny.")
        with sigterm_raises():
            failed = measure(calls, options)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
