"""DeepSpeed's checkpoints: each rank writes its part into its node's folder, and reads all ranks' parts.

A checkpoint folder holds ``engine.json`` (written_by.py), ``engine/`` (DeepSpeed's files: its shard from
every rank, with ZeRO 0-2 also the weights from rank 0) and ``random-00000.pt`` (a rank's generators).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from estimator.errors import UserError
from launchers.engines.gathering import gather_json
from launchers.engines.loop import generators
from launchers.engines.loop.written_by import WrittenBy, check_resumable
from launchers.engines.tensors_only import tensors_only
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, mark_part_complete

TAG = "engine"
UNIVERSAL_TAG = "universal"
CONVERSION_TIMEOUT_S = 3600


def save(engine: Any, job: TrainJob, env: RankEnv, step: int) -> None:
    """Write this rank's part of the checkpoint of ``step``, and mark it complete."""
    folder = job.checkpoint_dir(step)
    (folder / TAG).mkdir(parents=True, exist_ok=True)  # DeepSpeed creates it only on rank 0's node
    engine.save_checkpoint(
        str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=job.plan.adapters
    )
    generators.save(folder, env)
    if env.rank == 0:
        WrittenBy.of(job).write(folder)
    dist.barrier()
    mark_part_complete(folder, env, step)


def needs_conversion(job: TrainJob) -> bool:
    """Whether the checkpoint to resume from was sharded over a different number of processes.

    Raises UserError if DeepSpeed cannot resume from it.
    """
    if job.resume_dir is None:
        return False
    saved, current = check_resumable(job, job.resume_dir), WrittenBy.of(job)
    if current.stage == 0 or saved.world_size == current.world_size:
        return False  # without ZeRO nothing is sharded
    if current.optimizer != "adamw":
        raise UserError(
            f"the checkpoint was written by {saved.world_size} processes, this run has {current.world_size}:"
            " DeepSpeed can reshard AdamW's states only.",
            f"Resume with {saved.world_size} processes or with --set zero.stage=0 from the start.",
        )
    return True


def convert(job: TrainJob, env: RankEnv, device: torch.device) -> Path:
    """Rewrite the checkpoint for any number of processes ("universal"), once on each node.

    Called by every rank; returns the folder to load from once it exists.
    """
    assert job.resume_dir is not None  # noqa: S101 - needs_conversion() has checked it
    folder = job.work_dir / "engine" / "resume"
    failure: str | None = None
    if env.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        failure = _run_conversion(job.resume_dir / TAG, folder / UNIVERSAL_TAG)
    for text in gather_json(failure, device):
        if text:
            raise UserError(
                "DeepSpeed could not convert the checkpoint to this number of processes: "
                f"{text.strip().splitlines()[-1]}",
                "Resume with as many processes as wrote it.",
            )
    return folder


def _run_conversion(source: Path, destination: Path) -> str | None:
    """Run ds_to_universal in a separate process; return its message if it failed.

    It uses a temporary folder next to its output, and holds a complete shard in memory.
    """
    command = [sys.executable, "-m", "launchers.engines.deepspeed.conversion"]
    command += ["--input_folder", str(source), "--output_folder", str(destination), "--inject_missing_state"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done after {CONVERSION_TIMEOUT_S} s"
    return None if result.returncode == 0 else (result.stderr or f"exit status {result.returncode}")


def plain_classes() -> tuple[Any, ...]:
    """Return the classes, none with side effects, in DeepSpeed's files besides tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return fragment_address, ZeroStageEnum, LossScaler, DynamicLossScaler


def restore(engine: Any, job: TrainJob, env: RankEnv, converted: Path | None) -> None:
    """Restore weights, optimizer, schedule and random generators from the checkpoint."""
    assert job.resume_dir is not None  # noqa: S101 - the caller has checked it
    folder, tag = (job.resume_dir, TAG) if converted is None else (converted, UNIVERSAL_TAG)
    with tensors_only(job.resume_dir, plain_classes()):
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=not job.plan.adapters)
    if loaded is None:
        raise UserError(
            f"{folder}: DeepSpeed found no checkpoint in it.",
            "The folder must hold the files of all nodes; resume from an earlier checkpoint.",
        )
    _move_step_counts(engine.basic_optimizer)
    if converted is None:
        generators.restore(job.resume_dir, env)
    if converted is not None:
        dist.barrier()  # the node's other ranks may still be reading
        if env.local_rank == 0:
            shutil.rmtree(converted, ignore_errors=True)


def _move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move step counts to the parameters' device, as fused optimizers require; DeepSpeed restores floats."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if group.get("fused") and "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
