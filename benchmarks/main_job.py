"""Compare the flow with the bare trainer; measure the profiler's cost, and two nodes against one.

    python -m benchmarks.main_job    # about 20 minutes on 2 cores; writes benchmarks/results/main_job.*

Both sides train tiny-llama on the same prepared rows with the same generated recipe YAML. The bare side is
torchtune's own recipe file run by Python, with torchtune's own disk logger. Each side runs at two lengths:
the slope (seconds per additional step) is compared as a ratio; the rest is the fixed start-up time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import describe
from estimator.hardware.local_machine import detect
from estimator.job import Target
from estimator.models import find, resolve
from estimator.planning.planner import plan
from launchers import run_config, settings
from launchers.dataset import prepare, python_docs, rows
from launchers.engines.torchtune.config import recipe_config, recipe_name
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.run.job import build_job

RESULTS = Path(__file__).parent / "results"
FLOW = Path(__file__).parents[1] / "flows" / "finetune_flow.py"
CHOSEN = {
    "method": "full",
    "engine": "torchtune",
    "seq_len": 256,
    "global_batch_size": 8,
    "checkpoint_every": 1_000_000,
}
READ = """
import pickle, sys
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
step = "train" if "train" in {s.id for s in run} else "gather"
task = run[step].task
tasks = run["train" if step == "train" else "train_nodes"]
seconds = max((task.finished_at - task.created_at).total_seconds() for task in tasks)
outcome = task["outcome"].data
pickle.dump({"task_seconds": seconds, "dt": [m.dt for m in outcome.metrics],
    "tokens_per_second": [m.tokens_per_second for m in outcome.metrics],
    "sampling_share": outcome.measured.sampling_share}, sys.stdout.buffer)
"""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run. ``seconds``: the bare command's, or the flow's training task's, from start to end."""

    steps: int
    seconds: float
    step_seconds: float  # median without the first ten steps


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _config(steps: int | None = None) -> run_config.RunConfig:
    chosen = settings.build(CHOSEN, [] if steps is None else [f"max_steps={steps}"])
    config = run_config.resolve(chosen, find("tiny-llama"), method=chosen.method, engine=chosen.engine)
    return config if steps is None else config.with_checkpoint_interval(steps)


def bare(folder: Path, data: Path, model: Path, steps: int) -> Timing:
    """Run torchtune's recipe without this package."""
    settings = _config(steps)
    job = TrainJob(
        plan=plan(build_job(settings, find("tiny-llama"), steps), Target(machine=detect())),
        settings=settings,
        model=resolve("tiny-llama"),
        model_dir=model,
        data_dir=data,
        work_dir=folder / f"bare-{steps}",
        total_steps=steps,
    )
    values = recipe_config(job)
    logs = job.work_dir / "logs"
    values["metric_logger"] = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(logs),
    }
    values["log_peak_memory_stats"] = False
    job.work_dir.mkdir(parents=True)
    config = job.work_dir / "recipe.yaml"
    config.write_text(yaml.safe_dump(values))
    spec = importlib.util.find_spec("torchtune")
    if spec is None or spec.origin is None:
        raise SystemExit("torchtune is not installed: pip install -e '.[train]'")
    recipe = Path(spec.origin).parents[1] / "recipes" / f"{recipe_name(job)}.py"
    start = time.perf_counter()
    with (job.work_dir / "bare.log").open("wb") as output:
        subprocess.run(
            [sys.executable, "-m", "estimator.exact.torchtune_imports", str(recipe), "--config", str(config)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(os.cpu_count()),
                "OMP_WAIT_POLICY": "passive",
                "TIKTOKEN_CACHE_DIR": "",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )
    seconds = time.perf_counter() - start
    tokens = prepare_tokens(data, steps)
    speeds = [
        float(line.split("tokens_per_second_per_gpu:")[1].split()[0])
        for log in logs.glob("*")
        for line in log.read_text().splitlines()
        if "tokens_per_second_per_gpu:" in line
    ]
    # torchtune's tokens/s counts labels in the loss, so a step's seconds are its labels over that rate
    step_seconds = [count / speed for count, speed in zip(tokens, speeds, strict=True)]
    return Timing(steps=steps, seconds=seconds, step_seconds=median(step_seconds[10:]))


def prepare_tokens(data: Path, steps: int) -> list[int]:
    """Count the labels of each step."""
    from launchers.dataset.prepared import IGNORE, Prepared

    prepared = Prepared(data)
    batch = prepared.info.global_batch_size
    counts = [int((prepared.row(index).labels != IGNORE).sum()) for index in range(len(prepared))]
    return [
        sum(counts[row] for row in prepared.order[step * batch : (step + 1) * batch]) for step in range(steps)
    ]


def flow(folder: Path, data: Path, steps: int, *more: str) -> dict[str, Any]:
    """Run the whole flow; the training task is timed."""
    home = folder / f"flow-{steps}-{len(list(folder.iterdir()))}"
    home.mkdir()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in CHOSEN.items()]
    chosen = [*flags, f"--max-steps={steps}", f"--dataset={data}", "--set=evaluation.generations=0", *more]
    with (home / "output").open("wb") as output:
        subprocess.run(
            [sys.executable, str(FLOW), "run", *chosen, "--run-id-file", "run_id"],
            cwd=home,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )
    read = subprocess.run(
        [sys.executable, "-c", READ, f"FinetuneFlow/{(home / 'run_id').read_text()}"],
        cwd=home,
        stdout=subprocess.PIPE,
        check=True,
    )
    timings: dict[str, Any] = pickle.loads(read.stdout)  # noqa: S301
    return timings


def flow_timing(timing: dict[str, Any], steps: int) -> Timing:
    return Timing(steps=steps, seconds=timing["task_seconds"], step_seconds=median(timing["dt"][10:]))


def slope(short: Timing, long: Timing) -> float:
    return (long.seconds - short.seconds) / (long.steps - short.steps)


def run(short: int, long: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_llama.make(folder / "model")
        dataset = python_docs.write(folder / "docs.jsonl")
        config = _config()
        train, held_out = prepare.split(list(rows.read(dataset)), config)
        prepare.prepare(train, model, config, config.seq_len, folder / "data", held_out)
        timed_pairs = []
        for number in range(pairs):  # in turn, so that a slow stretch of the machine meets both
            times = {}
            for steps in (short, long):
                times[f"bare {steps}"] = bare(folder / f"pair-{number}", folder / "data", model, steps)
                measured = flow(folder, dataset, steps)
                times[f"flow {steps}"] = flow_timing(measured, steps)
            per_step = {
                side: slope(times[f"{side} {short}"], times[f"{side} {long}"]) for side in ("bare", "flow")
            }
            timed_pairs.append(
                {
                    "times": {key: asdict(value) for key, value in times.items()},
                    "seconds_per_step": per_step,
                    "ratio": per_step["flow"] / per_step["bare"],
                    "ratio_of_median_steps": times[f"flow {long}"].step_seconds
                    / times[f"bare {long}"].step_seconds,
                    "fixed_start_seconds": (times[f"flow {long}"].seconds - per_step["flow"] * long)
                    - (times[f"bare {long}"].seconds - per_step["bare"] * long),
                    "profiler_share": measured["sampling_share"],
                }
            )
        nodes = {count: flow(folder, dataset, 60, f"--nodes={count}") for count in (1, 2)}
    return {
        "command": f"python -m benchmarks.main_job --short {short} --long {long} --pairs {pairs}",
        "machine": describe(),
        "pairs": timed_pairs,
        "ratio": median([pair["ratio"] for pair in timed_pairs]),
        "ratio_of_median_steps": median([pair["ratio_of_median_steps"] for pair in timed_pairs]),
        "fixed_start_seconds": median([pair["fixed_start_seconds"] for pair in timed_pairs]),
        "profiler_share": max(pair["profiler_share"] for pair in timed_pairs),
        "nodes": {
            str(count): {
                "step_seconds": median(values["dt"][5:]),
                "tokens_per_second": median(values["tokens_per_second"][5:]),
            }
            for count, values in nodes.items()
        },
    }


def text(result: dict[str, Any]) -> str:
    one, two = result["nodes"]["1"], result["nodes"]["2"]
    pairs = "\n".join(
        f"| {number + 1} | {pair['seconds_per_step']['bare']:.4f} | {pair['seconds_per_step']['flow']:.4f} | "
        f"{pair['ratio']:.3f} | {pair['ratio_of_median_steps']:.3f} | {pair['fixed_start_seconds']:.1f} |"
        for number, pair in enumerate(result["pairs"])
    )
    return f"""# The main job

`{result["command"]}`, {result["machine"]["text"]}

tiny-llama, full, torchtune, fp32, batch 8, sequences of up to 256 tokens.

| pair | bare, s a step | flow, s a step | ratio | ratio of median steps | fixed start, s |
|---|---|---|---|---|---|
{pairs}

Median ratio {result["ratio"]:.3f}; ratio of the median steps {result["ratio_of_median_steps"]:.3f};
fixed start of the training task beyond the bare command {result["fixed_start_seconds"]:.1f} s.
The profiler (sampling and card) took {result["profiler_share"]:.2%} of the training task's time.

| nodes (on this one machine) | s a step | tokens/s |
|---|---|---|
| 1 | {one["step_seconds"]:.3f} | {one["tokens_per_second"]:,.0f} |
| 2, gloo | {two["step_seconds"]:.3f} | {two["tokens_per_second"]:,.0f} |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", type=int, default=100)
    parser.add_argument("--long", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=3)
    chosen = parser.parse_args()
    result = run(chosen.short, chosen.long, chosen.pairs)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "main_job.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "main_job.md").write_text(text(result))
    print(text(result))


if __name__ == "__main__":
    main()
