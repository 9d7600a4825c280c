"""One training process: its identity, telemetry and memory, and its error report."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from estimator.errors import UserError
from estimator.masking import mask_secrets
from launchers.report.telemetry import (
    DistInfo,
    Evaluated,
    EvaluationImages,
    Phase,
    Profiled,
    Step,
    Warned,
    Writer,
    memory_now,
)

# Peaks only grow, so at 20 steps/s one report in ten steps loses nothing
MEMORY_INTERVAL_S = 0.5


def scheduler_name() -> str:
    """Detect the scheduler from environment variables; "local" without one."""
    for variable, name in (
        ("METAFLOW_KUBERNETES_WORKLOAD", "kubernetes"),
        ("AWS_BATCH_JOB_ID", "batch"),
        ("SLURM_JOB_ID", "slurm"),
        ("PBS_JOBID", "pbs"),
    ):
        if variable in os.environ:
            return name
    return "local"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnv:
    """torchrun's environment of this process; a single process if it is not set."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int

    @classmethod
    def read(cls) -> RankEnv:
        """Read the environment variables of this process."""

        def value(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        return cls(
            rank=value("RANK", 0),
            local_rank=value("LOCAL_RANK", 0),
            world_size=value("WORLD_SIZE", 1),
            local_world_size=value("LOCAL_WORLD_SIZE", 1),
            node=value("GROUP_RANK", 0),
        )


class RankReporter:
    """Writer of this rank's telemetry."""

    def __init__(self, telemetry_dir: Path, env: RankEnv) -> None:
        self.env = env
        self._writer = Writer(telemetry_dir, env.rank)
        self._step = 0
        self._memory_at = -math.inf

    def started(self, *, device: str, backend: str, engine: str) -> None:
        """Report the rank's placement."""
        self._writer.write(
            DistInfo(
                rank=self.env.rank,
                local_rank=self.env.local_rank,
                world_size=self.env.world_size,
                node=self.env.node,
                host=socket.gethostname(),
                device=device,
                backend=backend,
                scheduler=scheduler_name(),
                engine=engine,
                pid=os.getpid(),
            )
        )

    def phase(self, name: str, step: int = 0) -> None:
        """Report the start of a phase and, after the first step, the memory peaks until then."""
        if self._step:
            self.memory(self._step)
        self._writer.write(Phase(rank=self.env.rank, name=name, step=step))

    def step(self, event: Step) -> None:
        """Report one optimizer step. Raises UserError if its loss is not finite: all weights are lost."""
        self._step = event.step
        if time.monotonic() - self._memory_at >= MEMORY_INTERVAL_S:
            self.memory(event.step)  # first, so that the step's log line can show it
        self._writer.write(event)
        if event.loss is not None and not math.isfinite(event.loss):
            raise UserError(
                f"The loss of step {event.step} is {event.loss}: training has diverged.",
                "Use a lower optimizer.lr or a longer warm-up (schedule.warmup_steps). In the first step, "
                "the cause is such values in the model's weights.",
            )

    def memory(self, step: int) -> None:
        """Report the process's memory peaks."""
        self._memory_at = time.monotonic()
        self._writer.write(memory_now(self.env.rank, step))

    def profiled(self, event: Profiled) -> None:
        """Report the end or failure of a profiled window."""
        self._writer.write(event)

    def evaluated(self, event: Evaluated) -> None:
        """Report the progress or result of an evaluation."""
        self._writer.write(event)

    def drawn(self, event: EvaluationImages) -> None:
        """Report generated images of captions."""
        self._writer.write(event)

    def warned(self, text: str) -> None:
        """Report that this rank continues in another way than planned."""
        self._writer.write(Warned(rank=self.env.rank, text=text))

    def close(self) -> None:
        self._writer.close()


def mark_part_complete(checkpoint_dir: Path, env: RankEnv, step: int) -> None:
    """Flush this rank's files of a checkpoint, then write rank-NNNNN.json to mark its part as complete.

    Call it on every rank after a barrier that follows the last write, so that no rank of this node is still
    writing.
    """
    for path in sorted(checkpoint_dir.rglob("*")):
        part_file = path.name.startswith("rank-") and path.suffix in (".json", ".tmp")
        if path.is_file() and not part_file:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    values = {"rank": env.rank, "world_size": env.world_size, "step": step, "at": time.time()}
    write_atomically(checkpoint_dir / f"rank-{env.rank:05d}.json", json.dumps(values))


def write_error(errors_dir: Path, rank: int, error: BaseException) -> None:
    """Write this rank's failure atomically for the node's task: errors/rank-NNNNN.json.

    Secrets are masked, because messages of libraries may contain addresses with a login or token.
    """
    values: dict[str, object] = {
        "rank": rank,
        "at": time.time(),
        "message": mask_secrets(f"{type(error).__name__}: {error}"),
        "traceback": mask_secrets("".join(traceback.format_exception(error))),
    }
    if isinstance(error, UserError):
        values["user"] = {"problem": mask_secrets(error.problem), "advice": mask_secrets(error.advice)}
    write_atomically(errors_dir / f"rank-{rank:05d}.json", json.dumps(values))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file, of which a reader sees all or nothing; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)
