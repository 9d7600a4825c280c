"""Small jobs of engines that use the training loop, on CPUs, one process per rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from estimator.models import resolve
from estimator.plan import Layout, MemoryEstimate, Plan, Prediction, Request
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset import prepared
from launchers.dataset.measured import MAX_ROWS
from launchers.evaluation import reference
from launchers.gang.job import TrainJob
from launchers.report import telemetry
from launchers.store.bundles import LocalStorage
from tests.lab.configs import config
from tests.launchers.engines import ranks

VOCAB = 256


def make_model(folder: Path, kind: str = "llama") -> Path:
    """Create a model with a few ten thousand random parameters."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        MixtralConfig,
        MixtralForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(1)
    if kind == "rewards":
        config = LlamaConfig(**shape, num_labels=1, pad_token_id=0)
        model: Any = LlamaForSequenceClassification(config)
    elif kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=kind == "tied"))
    model.save_pretrained(folder)
    return folder


def documents(count: int, seed: int = 0) -> list[prepared.Row]:
    """Return documents of 5 to 24 counting tokens; the first third is an uncounted prompt."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(5, 25))
        tokens = ((generator.integers(0, 100) + 3 * np.arange(length)) % VOCAB).astype(np.int32)
        labels = tokens.copy()
        labels[: max(1, length // 3)] = prepared.IGNORE
        rows.append(prepared.Row(tokens=tokens, labels=labels, lengths=np.array([length], dtype=np.int32)))
    return rows


END = VOCAB - 1  # of a conversation


def pairs(count: int, seed: int = 0) -> list[prepared.Row]:
    """Return prompts of 3 to 8 nonzero tokens; chosen answers count on, rejected ones are random."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt = (generator.integers(1, 50) + 3 * np.arange(generator.integers(3, 9))).astype(np.int32)
        better = prompt[-1] + 3 * np.arange(1, generator.integers(3, 9))
        worse = generator.integers(1, END, generator.integers(2, 8))
        parts = []
        for answer in (better, worse):
            tokens = np.concatenate([prompt, answer, [END]]).astype(np.int32)
            labels = tokens.copy()
            labels[: len(prompt)] = prepared.IGNORE
            lengths = np.array([len(tokens)], dtype=np.int32)
            parts.append(prepared.Row(tokens=tokens, labels=labels, lengths=lengths))
        rows.append(joined(parts))
    return rows


def judged(count: int, seed: int = 0) -> list[prepared.Row]:
    """Return both answers of :func:`pairs` as separate rows; of every third pair only the bad one."""
    rows = []
    for number, pair in enumerate(pairs(count, seed)):
        chosen, rejected = pair.documents()
        if number % 3:
            rows.append(chosen)
        rows.append(dataclasses.replace(rejected, desirable=False))
    return rows


def joined(rows: list[prepared.Row]) -> prepared.Row:
    return prepared.Row(
        tokens=np.concatenate([row.tokens for row in rows]),
        labels=np.concatenate([row.labels for row in rows]),
        lengths=np.concatenate([row.lengths for row in rows]),
    )


def make_data(
    folder: Path, rows: list[prepared.Row], *, batch: int, steps: int, order: Any = None, **changes: Any
) -> Path:
    """Write prepared data; ``changes``: fields of its info."""
    values: dict[str, Any] = {
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "label_tokens": sum(int((row.labels != prepared.IGNORE).sum()) for row in rows),
        "truncated_rows": 0,
        "longest_row": max(len(row.tokens) for row in rows),
        "seq_len": 128,
        "packed": any(len(row.lengths) > 1 for row in rows),
        "pad_id": 0,
        "vocab_size": VOCAB,
        "global_batch_size": batch,
        "total_steps": steps,
        "seed": 0,
        # by which a reference that was computed is found again
        "fingerprint": hashlib.sha256(b"".join(row.tokens.tobytes() for row in rows)).hexdigest(),
    }
    order = np.arange(len(rows)) if order is None else order
    order = np.resize(order, batch * steps).astype(np.int32)
    prepared.write(folder, rows, order, prepared.PreparedInfo(**values | changes))
    return folder


def mean_loss(network: Any, rows: list[prepared.Row]) -> float:
    """Return the mean loss of documents, each alone, by a transformers model."""
    import torch

    network.eval()
    total, count = 0.0, 0
    for row in rows:
        labels = torch.tensor(row.labels[1:]).long()
        with torch.no_grad():
            logits = network(input_ids=torch.tensor(row.tokens).long()[None]).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != prepared.IGNORE).sum())
    return total / count


def load(folder: Path) -> Any:
    """Load a transformers model in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plan_of(layout: Layout, engine: str, method: str) -> Plan:
    """Return a plan with this layout and no prediction."""
    memory = MemoryEstimate(
        categories=(),
        needs_range=(0, 0),
        shows_bytes=0,
        shows_range=(0, 0),
        capacity_bytes=None,
        host_bytes=0,
        needs_basis="none",
        shows_basis="none",
    )
    unknown = dict.fromkeys(("peak_flops_per_gpu", "tokens_per_second", "hours", "usd_per_hour", "usd"))
    return Plan(
        model="test",
        parameters=50_000,
        method=method,  # type: ignore[arg-type]
        engine=engine,
        target="local",
        request=Request(
            nodes=1, gpus_per_node=0, gpu_type=None, cpu=1, memory_mib=1, shared_memory_mib=1, disk_mib=1
        ),
        layout=layout,
        prediction=Prediction(memory=memory, flops_per_token=0.0, **unknown),  # type: ignore[arg-type]
    )


def make_job(
    work: Path,
    model: Path,
    data: Path,
    *,
    steps: int,
    world: int = 2,
    micro: int = 2,
    accumulation: int = 1,
    engine: str = "deepspeed",
    sharding: str = "zero2",
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> TrainJob:
    recompute = (settings or {}).get("recompute", {})
    recomputed = {name: value for name, value in recompute.items() if value != "auto"}
    layout = Layout(
        recompute=recomputed.get("what", "full"),
        recompute_every=recomputed.get("every", 1),
        device="cpu",
        nodes=1,
        processes_per_node=world,
        sharding=sharding,  # type: ignore[arg-type]
        micro_batch_size=micro,
        accumulation=accumulation,
        seq_len=128,
        activation_checkpointing=options.pop("activation_checkpointing", False),
        precision=options.pop("precision", "fp32"),
        optimizer="adamw",
        offload=options.pop("offload", "none"),
    )
    values = {"engine": engine, "seq_len": 128, "optimizer": {"lr": 1e-2}, "schedule": {"warmup_steps": 2}}
    chosen = config(values | (settings or {}))
    plan = plan_of(layout, engine, chosen.method)
    return TrainJob(
        plan=plan,
        settings=chosen.model_copy(update={"checkpoint_every": options.pop("checkpoint_every", 0)}),
        model=resolve("tiny-llama"),
        model_dir=model,
        data_dir=data,
        work_dir=work,
        total_steps=steps,
        **options,
    )


def with_reference(job: TrainJob, folder: Path) -> TrainJob:
    """Return the job with reference values of DPO and KTO, if needed, stored below ``folder``."""
    if not reference.is_needed(job):
        return job
    alone = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="test")
    store = LocalStorage(folder / "store")
    with ranks.forked_processes():
        job = dataclasses.replace(
            job, reference=reference.precompute(job, alone, store, folder / "reference")
        )
        if job.evaluates:
            held_out = dataclasses.replace(job, data_dir=job.held_out_dir)
            reference_of_held_out = reference.precompute(
                held_out, alone, store, folder / "held-out", max_rows=MAX_ROWS
            )
            job = dataclasses.replace(job, held_out_reference=reference_of_held_out)
    return job


def start(job: TrainJob) -> subprocess.CompletedProcess[str]:
    """Run the processes of a job to their end."""
    return ranks.train([job], limit_s=400)


def run_nodes(jobs: list[TrainJob]) -> None:
    """Run a job on several nodes, one process each, with separate work folders."""
    done = ranks.train(jobs)
    assert done.returncode == 0, done.stderr[-6000:]


def run(job: TrainJob) -> list[telemetry.Step]:
    """Run a job and return the steps of rank 0; fails with the output of the processes."""
    done = start(job)
    assert done.returncode == 0, done.stderr[-6000:]
    return steps(job)


def steps(job: TrainJob, rank: int = 0) -> list[telemetry.Step]:
    events = telemetry.Follower(job.telemetry_dir).poll()
    return [event for event in events if isinstance(event, telemetry.Step) and event.rank == rank]


def losses(reported_steps: list[telemetry.Step]) -> list[float]:
    return [step.loss for step in reported_steps if step.loss is not None]


def held_out_losses(job: TrainJob) -> dict[int, float]:
    """Return held-out losses by step, as evaluated by rank 0 during training."""
    events = telemetry.Follower(job.telemetry_dir).poll()
    evaluated = [event for event in events if isinstance(event, telemetry.Evaluated) and event.rank == 0]
    return {event.step: event.loss for event in evaluated if event.loss is not None}


def resumed(job: TrainJob, work: Path, step: int, **layout: Any) -> TrainJob:
    """Return the job resumed from its checkpoint after ``step`` steps."""
    plan = dataclasses.replace(job.plan, layout=dataclasses.replace(job.plan.layout, **layout))
    return dataclasses.replace(
        job,
        plan=plan,
        work_dir=work,
        start_step=step,
        resume_dir=job.checkpoint_dir(step),
        settings=job.settings.model_copy(update={"checkpoint_every": 0}),
    )


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
