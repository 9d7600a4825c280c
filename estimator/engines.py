"""What each engine implies where a Job and a Layout leave it open. To add an engine, add a row here."""

from __future__ import annotations

from estimator.job import Job
from estimator.plan import Layout
from estimator.setup import LossKind, Setup, StateSharding

# launchers/engines/torchtune_config.py uses the chunked loss; deepspeed_batches.py recomputes the head
LOSSES: dict[str, LossKind] = {"torchtune": "chunked", "deepspeed": "recomputed"}


def setup_of(job: Job, layout: Layout) -> Setup:
    """The step that the launchers run for a job in a layout."""
    sharding: StateSharding = layout.sharding
    shared = layout.sharding not in ("none", "ddp", "zero0")
    processes = layout.world_size // layout.tensor_parallel
    return Setup(
        model=job.model,
        engine=job.engine,
        method="lora" if job.method == "qlora" else job.method,
        quantization="nf4-double" if job.method == "qlora" else "none",
        lora_rank=job.lora_rank,
        lora_targets=job.lora_targets,
        precision=layout.precision,
        optimizer=job.optimizer,  # type: ignore[arg-type]
        sharding=sharding,
        shard=processes if shared else 1,
        replicate=1 if shared else processes,
        tensor=layout.tensor_parallel,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        seq_len=layout.seq_len,
        fixed_length=job.packing,
        document_mask=job.packing,
        checkpointing="full" if layout.activation_checkpointing else "none",
        compile=job.compile,
        loss=LOSSES[job.engine],
        offload="optimizer" if layout.offload == "cpu" else "none",
        device=layout.device,
        processes_per_node=layout.processes_per_node,
        keep_checkpoints=job.keep_checkpoints,
    )
