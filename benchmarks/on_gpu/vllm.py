"""Sample answers with vLLM and serve a model with it, on one GPU.

    python -m benchmarks.on_gpu.vllm
    python -m benchmarks.on_gpu.vllm --tiny       # tiny-llama on the CPU: transformers samples and serves
    python -m benchmarks.on_gpu.vllm --dry-run    # packages, models and requests, on any machine

Nothing is downloaded: Llama 3.2 1B has random weights, so answers are nonsense and always of the full length.
The samplers are those of rejection sampling (launchers.rejection): transformers and vLLM. The server is
started by ``finetune serve``. The result is vllm_DEVICE.json in ``--out``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import describe
from estimator import models
from estimator.errors import UserError
from launchers.base import workdir
from launchers.cluster.endpoint import unused_port
from launchers.dataset import render
from launchers.dataset.prompts import prompts_of
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.models import tiny_llama
from launchers.rejection import answers
from launchers.rejection.generation import GenerationRequest, generate
from launchers.settings import Settings
from launchers.settings.sections import Rejection

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
COMMAND = "from metaflow_extensions.finetune.command import main; main()"
NAME = "model"  # in requests
POLL_S, STOP_S = 0.5, 60.0
QUESTION = "Explain in one paragraph what a matrix product is, number"
Sampler = Literal["transformers", "vllm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the measurement."""

    device: Literal["cuda", "cpu"]
    model: str
    samplers: tuple[Sampler, ...]
    server: Sampler
    prompts: int
    answers: int
    new_tokens: int
    requests: int  # sent to the server at once


ON_GPU = Scale(
    device="cuda",
    model="llama-3.2-1b",
    samplers=("vllm", "transformers"),
    server="vllm",
    prompts=64,
    answers=4,
    new_tokens=128,
    requests=16,
)
TINY = Scale(
    device="cpu",
    model="tiny-llama",
    samplers=("transformers",),
    server="transformers",
    prompts=8,
    answers=2,
    new_tokens=16,
    requests=2,
)


def sample(scale: Scale, sampler: Sampler, model: Path, folder: Path) -> dict[str, Any]:
    """Sample answers and return the generated tokens per second, with and without the start."""
    folder.mkdir()
    settings = Settings(
        seed=0,
        rejection=Rejection(generator=sampler, answers=scale.answers, max_new_tokens=scale.new_tokens),
    )
    conversations = [
        Conversation(
            messages=(
                Message(role="user", content=f"{QUESTION} {number}"),
                Message(role="assistant", content="x"),
            )
        )
        for number in range(scale.prompts)
    ]
    rows = prompts_of(conversations, render.load_tokenizer(model, settings))
    answers.write_rows(folder / "prompts.jsonl", rows)
    request = GenerationRequest(
        base_dir=model,
        model_dir=model,
        prompts=folder / "prompts.jsonl",
        work_dir=folder / "work",
        shards_dir=folder / "shards",
        settings=settings,
        device=scale.device,
        limit=answers.BatchLimit(sequences=256, tokens=65536),
    )
    begin, ends = time.monotonic(), list[float]()
    generate(request, lambda _number, _path: ends.append(time.monotonic()))
    tokens = scale.prompts * scale.answers * scale.new_tokens
    return {
        "sampler": sampler,
        "seconds": round(time.monotonic() - begin, 1),
        "seconds_until_first_shard": round(ends[0] - begin, 1),
        "at_most_tokens": tokens,
        "at_most_tokens_per_s": round(tokens / (time.monotonic() - begin), 1),
    }


def serve(scale: Scale, model: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """Start ``finetune serve``, send requests at once, and stop it. Raises UserError if it does not start."""
    port = unused_port()
    command = [sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(port), "--name", NAME]
    command += ["--server", scale.server, "--device", scale.device, "--context", "1024"]
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > begin + limit_s:
                raise UserError(f"{scale.server} did not start in {limit_s:.0f} s.", f"See {log}.")
            time.sleep(POLL_S)
        started_s, begin = time.monotonic() - begin, time.monotonic()
        with ThreadPoolExecutor(scale.requests) as pool:
            tokens = sum(pool.map(lambda _: _request(port, scale.new_tokens), range(scale.requests)))
        seconds = time.monotonic() - begin
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {
        "server": scale.server,
        "seconds_to_start": round(started_s, 1),
        "requests": scale.requests,
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
    }


def _is_ready(port: int) -> bool:
    try:
        return _send(port, "GET", "/health").status == HTTPStatus.OK
    except OSError:
        return False


def _request(port: int, new_tokens: int) -> int:
    """Send a chat request and return the number of generated tokens."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": new_tokens,
    }
    response = _send(port, "POST", "/v1/chat/completions", json.dumps(body))
    return int(json.load(response)["usage"]["completion_tokens"])


def _send(port: int, method: str, path: str, body: str | None = None) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", port, timeout=STOP_S)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    return connection.getresponse()


def measure(scale: Scale, out: Path, minutes: float) -> dict[str, Any]:
    """Sample and serve; a part that fails is reported in place of its figures."""
    figures: dict[str, Any] = {"machine": describe(), "model": scale.model}
    limit = time.monotonic() + 60 * minutes
    with workdir.work_folder("on_gpu", "vllm", "0") as folder:
        dtype = "bfloat16" if scale.device == "cuda" else "float32"
        model = tiny_llama.make(
            folder / scale.model, config=tiny_llama.config_of(models.find(scale.model), dtype)
        )
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            **{
                f"sample, {name}": partial(sample, scale, name, model, folder / name)
                for name in scale.samplers
            },
            f"serve, {scale.server}": lambda: serve(
                scale, model, out / "vllm_serve_log.txt", limit - time.monotonic()
            ),
        }
        for name, step in steps.items():
            try:
                figures[name] = step()
            except (UserError, RuntimeError, OSError) as error:
                figures[name] = {"problem": " ".join(str(error).split())[:300]}
            print(f"{name}: {figures[name]}", flush=True)
            file = out / f"vllm_{scale.device}.json"
            file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> None:
    """Run ``python -m benchmarks.on_gpu.vllm``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu.vllm",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit of the whole (default: 6)")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny-llama on the CPU")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, on any machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    scale = TINY if options.tiny else ON_GPU
    has_vllm = importlib.util.find_spec("vllm") is not None
    if options.dry_run:
        print(f"model: {scale.model}, random weights; device: {scale.device}")
        print(f"samplers: {', '.join(scale.samplers)}; server: {scale.server}")
        print(f"vllm: {'installed' if has_vllm else 'not installed'}")
        return
    try:
        if scale.device == "cuda" and not describe()["gpus"]:
            raise UserError("No NVIDIA GPU is found by its driver (NVML).", "Use --tiny or --dry-run.")
        if "vllm" in scale.samplers and not has_vllm:
            raise UserError("The package vllm is not installed.", "pip install 'metaflow-finetune[vllm]'.")
        options.out.mkdir(parents=True, exist_ok=True)
        figures = measure(scale, options.out, options.minutes)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(any("problem" in each for each in figures.values() if isinstance(each, dict)))


if __name__ == "__main__":
    main()
