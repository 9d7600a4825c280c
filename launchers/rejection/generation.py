"""Generation of several answers per prompt.

``python -m launchers.rejection.generation request.json`` computes the missing shards of answers. The content
of a shard does not depend on shards computed before it in the same process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from estimator.errors import UserError
from launchers.base.imports import collector_paused
from launchers.base.request_process import read_request, serve, write_request
from launchers.dataset import prompts
from launchers.dataset.prompts import Prompt
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, BatchLimit
from launchers.rejection.shards import make_shards
from launchers.settings import Settings

FIND_S = 120  # time limit for an interpreter to find a package


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Input of the generation process."""

    base_dir: Path
    model_dir: Path  # the model, or an adapter of the base
    prompts: Path  # rows of Prompt
    work_dir: Path  # receives request.json and request.log
    shards_dir: Path  # receives the shards of Answers
    settings: Settings  # uses its rejection section and its seed
    device: Literal["cuda", "cpu"]
    limit: BatchLimit
    gpus: int = 1  # GPUs that share one copy of the model
    memory_bytes: int | None = None  # memory limit on each of them; None: unknown
    node: int = 0
    nodes: int = 1  # this node computes the shards with number % nodes == node

    def shards(self) -> dict[int, list[Prompt]]:
        """Return this node's shards, by their number among all."""
        shards = self._all_shards()
        return {shard: shards[shard] for shard in range(self.node, len(shards), self.nodes)}

    def count(self) -> int:
        """Count the shards of all nodes."""
        return len(self._all_shards())

    def _all_shards(self) -> list[list[Prompt]]:
        rejection = self.settings.rejection
        return rows.shards_of(
            prompts.read_prompts(self.prompts),
            rejection.answers,
            limit=self.limit,
            new_tokens=rejection.max_new_tokens,
        )

    def save(self) -> Path:
        """Write request.json into the work folder."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        return write_request(self.work_dir / "request.json", self)


def check_vllm(python: str | None) -> str:
    """Return the interpreter that runs vLLM, for a Python that a user has named (None: this one).

    Raises UserError if there is no such program on this machine, or no vLLM in it.
    """
    interpreter = python or sys.executable
    path = shutil.which(str(Path(interpreter).expanduser()))
    if path is None:
        raise UserError(
            f"rejection.generator_python {interpreter}: there is no such program here.",
            "Use the Python of an environment with vLLM, such as /srv/vllm/bin/python.",
        )
    code = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
    try:
        result = subprocess.run([path, "-c", code], check=False, timeout=FIND_S, cwd="/", capture_output=True)
    except subprocess.TimeoutExpired:
        raise UserError(f"rejection.generator_python {interpreter}: no response within {FIND_S} s.") from None
    if result.returncode:
        raise UserError(
            f"--rejection-generator vllm: there is no vLLM in {interpreter}.",
            (
                "Install it (docs/rejection.md#vllm), or set the Python of an environment that has it: "
                "--rejection-generator-python /srv/vllm/bin/python."
            ),
        )
    return path


def generate(request: GenerationRequest, on_shard: Callable[[int, Path], None]) -> int:
    """Compute this node's missing shards of answers, and return the number of its shards.

    Raises UserError for user errors, RuntimeError if the process was ended; calling it again continues with
    the missing shards.
    """
    path, shards = request.save(), request.shards()
    rejection = request.settings.rejection
    python = check_vllm(rejection.generator_python) if rejection.generator == "vllm" else None
    make_shards(
        "launchers.rejection.generation",
        path,
        request.shards_dir,
        tuple(shards),
        name="sampling answers",
        device=request.device,
        limit_s=request.settings.resources.hang_timeout_s,
        on_shard=on_shard,
        python=python,
    )
    return len(shards)


class Sampler(Protocol):
    """Interface of a sampler of answers."""

    def answers(self, prompts: Sequence[Prompt]) -> list[Answers]:
        """Sample answers to each prompt, in the order of the prompts."""


def main(path: Path) -> None:
    """Compute the missing shards in this process."""
    request = read_request(GenerationRequest, path)
    sampler = _sampler(request)
    for shard, shard_prompts in request.shards().items():
        file = request.shards_dir / rows.shard_name(shard)
        if not file.is_file():
            rows.write_rows(file, sampler.answers(shard_prompts))


def _sampler(request: GenerationRequest) -> Sampler:
    settings = request.settings
    if settings.rejection.generator == "vllm":
        from launchers.rejection.vllm_sampler import VllmSampler

        return VllmSampler(
            request.model_dir,
            settings,
            device=request.device,
            limit=request.limit,
            gpus=request.gpus,
            memory_bytes=request.memory_bytes,
            longest=max((prompt.tokens for prompt in prompts.read_prompts(request.prompts)), default=1),
        )
    from launchers.rejection.transformers_sampler import TransformersSampler

    return TransformersSampler(
        request.model_dir, request.base_dir, settings, device=request.device, limit=request.limit
    )


if __name__ == "__main__":
    with collector_paused():
        import torch  # noqa: F401 - imported here to save time

    serve(main)
