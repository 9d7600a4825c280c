"""Small torchtune jobs on CPUs, each rank a process."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from estimator.models import resolve
from estimator.plan import Layout, MemoryEstimate, Plan, Prediction, Request
from launchers.dataset import prepared
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.report import telemetry
from launchers.settings import Settings
from tests.launchers.engines import ranks

SEQ_LEN = 64


def make_model(folder: Path) -> Path:
    return tiny_llama.make(folder)


def documents(count: int, seed: int = 0) -> list[prepared.Row]:
    """Documents of 5 to 24 tokens that count upwards; the first third is a prompt that does not count."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(5, 25))
        tokens = ((generator.integers(0, 100) + 3 * np.arange(length)) % 256).astype(np.int32)
        labels = tokens.copy()
        labels[: max(1, length // 3)] = prepared.IGNORE
        rows.append(prepared.Row(tokens=tokens, labels=labels, lengths=np.array([length], dtype=np.int32)))
    return rows


def joined(rows: list[prepared.Row]) -> prepared.Row:
    return prepared.Row(
        tokens=np.concatenate([row.tokens for row in rows]),
        labels=np.concatenate([row.labels for row in rows]),
        lengths=np.concatenate([row.lengths for row in rows]),
    )


def make_data(
    folder: Path, *, batch: int, steps: int, packed: bool = False, rows: list[prepared.Row] | None = None
) -> Path:
    rows = rows or documents(24)
    order = np.random.default_rng(3).permutation(np.resize(np.arange(len(rows)), batch * steps))
    info = prepared.PreparedInfo(
        rows=len(rows),
        tokens=sum(len(row.tokens) for row in rows),
        label_tokens=sum(int((row.labels != prepared.IGNORE).sum()) for row in rows),
        truncated_rows=0,
        longest_row=max(len(row.tokens) for row in rows),
        seq_len=SEQ_LEN,
        packed=packed,
        pad_id=0,
        vocab_size=4096,
        global_batch_size=batch,
        total_steps=steps,
        seed=0,
        fingerprint="test",
    )
    prepared.write(folder, rows, order.astype(np.int32), info)
    return folder


def make_plan(method: str = "full", **layout: Any) -> Plan:
    values: dict[str, Any] = {
        "device": "cpu",
        "nodes": 1,
        "processes_per_node": 1,
        "sharding": "fsdp",
        "micro_batch_size": 2,
        "accumulation": 1,
        "seq_len": SEQ_LEN,
        "activation_checkpointing": False,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    return Plan(
        model="tiny-llama",
        parameters=5_000_000,
        method=method,  # type: ignore[arg-type]
        engine="torchtune",
        target="local",
        request=Request(
            nodes=1, gpus_per_node=0, gpu=None, cpu=1, memory_mib=1, shared_memory_mib=1, disk_mib=1
        ),
        layout=Layout(**(values | layout)),
        prediction=Prediction(
            memory=MemoryEstimate(
                categories=(),
                needs_range=(0, 0),
                shows_bytes=0,
                shows_range=(0, 0),
                capacity_bytes=None,
                host_bytes=0,
                needs_basis="none",
                shows_basis="none",
            ),
            flops_per_token=0.0,
            peak_flops_per_gpu=None,
            tokens_per_second=None,
            hours=None,
            usd_per_hour=None,
            usd=None,
        ),
    )


def make_job(
    work: Path,
    model: Path,
    data: Path,
    *,
    steps: int,
    world: int = 1,
    settings: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    checkpoint_every: int = 0,
) -> TrainJob:
    values = {"optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 2}}
    values |= {"checkpoint_every": checkpoint_every}
    chosen = Settings.model_validate(values | (settings or {}))
    return TrainJob(
        plan=make_plan(chosen.method, **({"processes_per_node": world} | (layout or {}))),
        settings=chosen,
        model=resolve("tiny-llama"),
        model_dir=model,
        data_dir=data,
        work_dir=work,
        total_steps=steps,
    )


def start(job: TrainJob, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run a job's processes to their end."""
    return ranks.train([job], limit_s=timeout)


def run(job: TrainJob) -> list[telemetry.Step]:
    """Run a job; the steps of rank 0. Fails with the processes' output."""
    done = start(job)
    assert done.returncode == 0, done.stderr[-6000:]
    return steps(job)


def events(job: TrainJob) -> list[telemetry.Event]:
    return list(telemetry.Follower(job.telemetry_dir).poll())


def steps(job: TrainJob, rank: int = 0) -> list[telemetry.Step]:
    return [event for event in events(job) if isinstance(event, telemetry.Step) and event.rank == rank]


def losses(found: list[telemetry.Step]) -> list[float]:
    return [step.loss for step in found if step.loss is not None]


def resumed(job: TrainJob, work: Path, step: int, **layout: Any) -> TrainJob:
    """The job as it goes on from its checkpoint after ``step`` steps."""
    plan = dataclasses.replace(job.plan, layout=dataclasses.replace(job.plan.layout, **layout))
    return dataclasses.replace(
        job,
        plan=plan,
        work_dir=work,
        start_step=step,
        resume_dir=job.checkpoint_dir(step),
        settings=job.settings.model_copy(update={"checkpoint_every": 0}),
    )
