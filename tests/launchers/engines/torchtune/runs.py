"""Small torchtune jobs on CPUs, each rank a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from estimator.models import resolve
from estimator.plan import Layout, Plan
from launchers.dataset import prepared
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.report import telemetry
from tests.lab.configs import config
from tests.launchers.engines.loop import runs as loop_runs

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


joined, run, steps = loop_runs.joined, loop_runs.run, loop_runs.steps
losses, resumed = loop_runs.losses, loop_runs.resumed


def make_data(
    folder: Path, *, batch: int, steps: int, packed: bool = False, rows: list[prepared.Row] | None = None
) -> Path:
    rows = rows or documents(24)
    order = np.random.default_rng(3).permutation(np.resize(np.arange(len(rows)), batch * steps))
    info = {"seq_len": SEQ_LEN, "vocab_size": tiny_llama.VOCAB_SIZE, "packed": packed}
    return loop_runs.make_data(folder, rows, batch=batch, steps=steps, order=order, **info)


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
    return loop_runs.plan_of(Layout(**(values | layout)), "torchtune", method)


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
    values = {"seq_len": SEQ_LEN, "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 2}}
    values |= {"checkpoint_every": checkpoint_every}
    chosen = config(values | (settings or {}))
    return TrainJob(
        plan=make_plan(chosen.method, **({"processes_per_node": world} | (layout or {}))),
        settings=chosen,
        model=resolve("tiny-llama"),
        model_dir=model,
        data_dir=data,
        work_dir=work,
        total_steps=steps,
    )


def events(job: TrainJob) -> list[telemetry.Event]:
    return list(telemetry.Follower(job.telemetry_dir).poll())
