"""Measure time and memory of turning dataset rows into tokens.

    python -m benchmarks.prepare_rows --rows 200000    # its row in benchmarks/results/prepare_rows.*
    python -m benchmarks.prepare_rows --rows 2000000 --form pretrain --packing

Chats of about 370 bytes a row (or as much plain text), drawn by a seed, are read, checked and tokenized for
tiny-llama like in a run. Memory is the private memory of the process and its children (shared pages counted
once, mapped files not at all), minus that of the process once everything is imported. Silence is the longest
time without a line of output.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
ROW_BYTES = 370
LIMITS = {"seconds": 120.0, "memory_mib": 1024.0, "silence_seconds": 10.0}  # of 200,000 chats on 2 cores
POLL_S = 0.2  # between two readings of the memory

READY, DONE = "ready", "done "
# Run in a separate process, like a task of the flow, with its output through a pipe.
WORK = """
import sys, time
from pathlib import Path
from estimator import models
from launchers import run_config, settings
from launchers.run import preparation
from launchers.dataset import prepare, render
import transformers
file, folder, task, packing = sys.argv[1:]
folder = Path(folder)
chosen = settings.build(
    {"dataset": file, "task": task, "packing": packing == "True", "seq_len": 256, "engine": "fsdp2"}
)
config = run_config.resolve(chosen, models.find("tiny-llama"), method="full", engine=chosen.engine)
from launchers.models import tiny_llama
model = tiny_llama.make(folder / "model")
render.load_tokenizer(model, chosen)
print("ready", flush=True)
began = time.perf_counter()
rows, held_out = preparation.read_data(chosen, folder / "rows")
read = time.perf_counter()
info = preparation.tokenize(rows, held_out, config, model, folder / "data")
print("done", read - began, time.perf_counter() - read, info.tokens, info.fingerprint, flush=True)
"""


def write_rows(path: Path, rows: int, task: str, seed: int = 0) -> None:
    """Write a JSONL file of ``rows`` distinct rows."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 9))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            question = f"{number}: " + " ".join(draw.choices(words, k=draw.randint(6, 16)))
            answer = " ".join(draw.choices(words, k=draw.randint(8, 54)))
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row = {"text": f"{question}\n{answer}"} if task == "pretrain" else {"messages": chat}
            file.write(json.dumps(row) + "\n")


def memory_of(process: psutil.Process) -> int:
    """Return the private bytes of a process and its descendants, without mapped files."""
    total = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            status = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except OSError:  # it has just ended
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("Pss_Anon:")
        )
    return total


def measure(rows: int, task: str, packing: bool) -> dict[str, Any]:
    """Write the rows and prepare them in a separate process, whose memory and output are watched."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "rows.jsonl"
        write_rows(file, rows, task)
        command = [sys.executable, "-c", WORK, str(file), str(folder), task, str(packing)]
        quiet = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | quiet
        ) as process:
            result = _watched(process)
        if process.returncode:
            raise SystemExit(f"preparing the rows failed:\n{result['output']}")
        read, tokenized, tokens, fingerprint = result["output"].rpartition(DONE)[2].split()
        return {
            "rows": rows,
            "form": task,
            "packing": packing,
            "megabytes": round(file.stat().st_size / 1e6, 1),
            "read_seconds": round(float(read), 1),
            "tokenize_seconds": round(float(tokenized), 1),
            "seconds": round(float(read) + float(tokenized), 1),
            "memory_mib": round(result["memory"] / 2**20),
            "silence_seconds": round(result["silence"], 1),
            "tokens": int(tokens),
            "fingerprint": fingerprint,
            "load_average": round(os.getloadavg()[0], 1),
        }


def _watched(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return a process's output, its peak memory above the start, and its longest silence."""
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    output = process.stdout

    def listen() -> None:
        for line in output:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    watched, text, start, peak, silence = psutil.Process(process.pid), "", 0, 0, 0.0
    last_output_s: float | None = None
    while True:
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            line = ""
        if line is None:
            break
        if last_output_s is not None:
            if line:
                silence, last_output_s = max(silence, time.monotonic() - last_output_s), time.monotonic()
            peak = max(peak, memory_of(watched))
        elif line.strip() == READY:
            start, last_output_s = memory_of(watched), time.monotonic()
        text += line
    return {"output": text, "memory": peak - start, "silence": silence}


def _kind(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the identity of a result; a new one replaces the old one with the same identity."""
    return result["rows"], result["form"], result["packing"]


def markdown(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    commands = " and ".join(f"`{command}`" for command in dict.fromkeys(r["command"] for r in results))
    lines = [
        "# From rows to tokens",
        "",
        f"{commands}, {machine['text']}. Other work ran on the machine: the load of each row is its "
        "average over the last minute.",
        "",
        "| rows | task | packed | MB | read and checked | tokenized | total | memory beyond the start "
        "| longest silence | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['rows']:,} | {r['form']} | {'yes' if r['packing'] else 'no'} | {r['megabytes']:,.0f} "
        f"| {r['read_seconds']:.0f} s | {r['tokenize_seconds']:.0f} s | {r['seconds']:.0f} s "
        f"| {r['memory_mib']:,} MiB | {r['silence_seconds']:.1f} s | {r['load_average']} |"
        for r in results
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000])
    parser.add_argument("--form", choices=("sft", "pretrain"), default="sft")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.prepare_rows", *sys.argv[1:]])
    machine = describe()
    file = options.out / "prepare_rows.json"
    stored = json.loads(file.read_text()) if file.is_file() else {}
    earlier = stored.get("results", []) if stored.get("machine") == machine else []
    results = {_kind(result): result for result in earlier}
    for rows in options.rows:
        result = measure(rows, options.form, options.packing) | {"command": command}
        results[_kind(result)] = result
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(machine, list(results.values()))
    record = {"machine": machine, "limits": LIMITS, "results": list(results.values())}
    (options.out / "prepare_rows.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "prepare_rows.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
