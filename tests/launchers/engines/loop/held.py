"""Tensors that the ranks of a job hold right after a backward pass, measured in the ranks."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from launchers.gang.job import TrainJob
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs

STEP = 3  # the optimizer has its states by then


def of_each_rank(job: TrainJob) -> list[dict[str, int]]:
    """Train, and return the bytes that each rank held, by purpose."""
    done = ranks.train([job], entry=f"{__name__}:train")
    assert done.returncode == 0, done.stderr[-6000:]
    return [runs.read_json(_file(job, rank)) for rank in range(job.plan.layout.world_size)]


def train(job: TrainJob) -> None:
    """Run the training loop of the engine in a rank and measure once."""
    from launchers.engines.loop import train as loop

    if job.plan.engine == "fsdp2":
        from launchers.engines.fsdp2.sharding import FullyShard as Engine
    else:
        from launchers.engines.deepspeed.sharding import Zero as Engine  # type: ignore[assignment]
    loop.train(job, _Watched(Engine()))


def _file(job: TrainJob, rank: int) -> Path:
    return job.work_dir / f"held-{rank}.json"


class _Watched:
    """A sharding whose model is measured after the last backward pass of a step."""

    def __init__(self, sharding: Any) -> None:
        self._sharding = sharding
        self.name, self.start = sharding.name, sharding.start

    def load(self, job: TrainJob, env: Any, device: Any) -> Any:
        model = self._sharding.load(job, env, device)
        forward, backward = model.logits, model.backward
        of_batch: list[Any] = []  # what is no state; kept, so that no state is put where one of them was
        steps = []

        def logits(**inputs: Any) -> Any:
            output = forward(**inputs)
            of_batch.extend(tensor.detach() for tensor in (output, *inputs.values()))
            return output

        def watched(*arguments: Any, last: bool) -> None:
            backward(*arguments, last=last)
            steps.append(last)
            if last and sum(steps) == STEP:
                _file(job, env.rank).write_text(json.dumps(_held(model, of_batch)))

        model.logits, model.backward = logits, watched
        return model


def _held(model: Any, of_batch: list[Any]) -> dict[str, int]:
    """Return the bytes of all tensor storages of this process; unnamed ones are "others"."""
    import torch
    from torch.distributed.tensor import DTensor

    gc.collect()
    stored_tensors = {tensor.untyped_storage().data_ptr(): (0, "batch") for tensor in of_batch}

    def add(tensor: Any, name: str) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, torch.Tensor) and not local.is_meta:
            storage = local.untyped_storage()
            stored_tensors.setdefault(storage.data_ptr(), (storage.nbytes(), name))

    for parameter in model.module.parameters():
        name = "adapters" if parameter.requires_grad else "weights"
        add(parameter, name)
        add(getattr(parameter, "ds_tensor", None), name)  # ZeRO-3's part
        add(parameter.grad, "gradients")
    for buffer in model.module.buffers():
        add(buffer, "weights")
    optimizers = [model._engine.basic_optimizer] if hasattr(model, "_engine") else model._optimizers
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            add(parameter, "master weights")  # ZeRO's copies; others are in the module
            for tensor in state.values():
                add(tensor, "optimizer")
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor):
            add(tensor, "others")
    total: dict[str, int] = {}
    for size, name in stored_tensors.values():
        total[name] = total.get(name, 0) + size
    return total
