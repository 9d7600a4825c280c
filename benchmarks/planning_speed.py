"""Time a plan, and `accelerate estimate-memory` for a model of the same size.

    python -m benchmarks.planning_speed    # about 2 minutes; writes benchmarks/results/planning_speed.*

Cold: a new process each time, from start to end, over the whole catalogue of GPUs and machines. Warm: one
process plans several different models, so that no plan is cached. Accelerate reads a local config.json; its
first request to the Hub is stubbed, which saves it the network time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from estimator.models import find

RESULTS = Path(__file__).parent / "results"
MODEL = "llama-70b"
OTHERS = ("llama-3-70b", "llama-2-70b", "qwen2.5-72b", "mistral-7b", "qwen3-32b", "llama-8b", "codestral")
LIMITS = {"cold_seconds": 0.4, "warm_milliseconds": 150.0, "times_faster": 10.0}

ENTRY = "from estimator.cli.app import main; main()"
# One process: time of a plan once Python and the modules are loaded
WARM = """
import json, sys, time
from typer.testing import CliRunner
from estimator.cli.app import app
runner = CliRunner()
def plan(model):
    start = time.perf_counter()
    found = runner.invoke(app, ["plan", "--model", model, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return time.perf_counter() - start
plan("tiny-llama")
print(json.dumps([plan(model) for model in sys.argv[1:]]))
"""
# The installed command; only its request to the Hub, whether the model exists, is stubbed
ACCELERATE = """
import sys
from types import SimpleNamespace
from accelerate.commands import estimate
estimate.verify_on_hub = lambda *_: SimpleNamespace(library_name="transformers", config={})
sys.argv = ["accelerate estimate-memory", sys.argv[1], "--library_name", "transformers"]
estimate.main()
"""


def seconds(command: list[str]) -> float:
    """Time a process; raises SystemExit with its output if it fails."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "120"}
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet, check=False)
    duration = time.perf_counter() - start
    if ended.returncode:
        raise SystemExit(f"{shlex.join(command[:3])} failed:\n{ended.stderr[-2000:]}")
    return duration


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def write_config(folder: Path) -> Path:
    """Write a config.json of the same model for Accelerate."""
    model = find(MODEL)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.max_seq_len,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(repeats: int) -> dict[str, Any]:
    """Time cold plans, warm plans and Accelerate in turn, so that load on the machine affects all equally."""
    script = Path(sys.executable).with_name("finetune")
    # What the installed script does, where the checkout was not installed with it
    finetune = [str(script)] if script.exists() else [sys.executable, "-c", ENTRY]
    commands = ["plan", "--model", MODEL]
    cold, bare, rival = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = str(write_config(Path(name)))
        for _ in range(repeats):
            cold.append(seconds([*finetune, *commands]))
            rival.append(seconds([sys.executable, "-c", ACCELERATE, folder]))
            bare.append(seconds([sys.executable, "-c", "pass"]))
    inside = subprocess.run(
        [sys.executable, "-c", WARM, *OTHERS], capture_output=True, text=True, check=False
    )
    if inside.returncode:
        raise SystemExit(f"planning inside one process failed:\n{inside.stderr[-2000:]}")
    warm = json.loads(inside.stdout.splitlines()[-1])
    return {
        "command": shlex.join(["finetune", *commands]),
        "cold_seconds": cold,
        "cold_median": median(cold),
        "python_alone_median": median(bare),
        "warm_milliseconds": {model: 1000 * value for model, value in zip(OTHERS, warm, strict=True)},
        "warm_median": 1000 * median(warm),
        "warm_slowest": 1000 * max(warm),
        "accelerate_seconds": rival,
        "accelerate_median": median(rival),
        "times_faster": median(rival) / median(cold),
    }


def kept(medians: dict[str, Any]) -> dict[str, bool]:
    """Return which of the limits hold."""
    return {
        "cold_seconds": medians["cold_median"] < LIMITS["cold_seconds"],
        "warm_milliseconds": medians["warm_slowest"] < LIMITS["warm_milliseconds"],
        "times_faster": medians["times_faster"] >= LIMITS["times_faster"],
    }


def markdown(command: str, machine: dict[str, Any], results: dict[str, Any]) -> str:
    answers = {True: "kept", False: "not kept"}
    ok = {name: answers[value] for name, value in kept(results).items()}
    return "\n".join(
        [
            "# Speed of planning",
            "",
            f"`{command}`, {machine['text']}",
            "",
            "| what | median | of | limit | |",
            "|---|---|---|---|---|",
            f"| `{results['command']}`, a new process | {results['cold_median']:.2f} s "
            f"| {len(results['cold_seconds'])} runs | < {LIMITS['cold_seconds']} s | {ok['cold_seconds']} |",
            f"| a plan inside one process (slowest {results['warm_slowest']:.0f} ms) "
            f"| {results['warm_median']:.0f} ms | {len(OTHERS)} models | < 150 ms "
            f"| {ok['warm_milliseconds']} |",
            f"| `accelerate estimate-memory`, the same size | {results['accelerate_median']:.2f} s "
            f"| {len(results['accelerate_seconds'])} runs | | |",
            f"| ours is faster by | {results['times_faster']:.1f}x | | >= 10x | {ok['times_faster']} |",
            f"| Python alone, started and ended | {results['python_alone_median']:.2f} s | | | |",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.planning_speed", *sys.argv[1:]])
    machine, results = describe(), measure(options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(command, machine, results)
    result = {"command": command, "machine": machine, "limits": LIMITS, "kept": kept(results), **results}
    (options.out / "planning_speed.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "planning_speed.md").write_text(text)
    print(text)
    if not all(kept(results).values()):
        raise SystemExit("a limit is not kept: see above")


if __name__ == "__main__":
    main()
