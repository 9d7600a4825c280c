"""The real kernels of Liger-Kernel on a CPU, in the interpreter of Triton, in a separate process.

    TRITON_INTERPRET=1 python -m tests.launchers.engines.loop.interpreted families
    TRITON_INTERPRET=1 python -m tests.launchers.engines.loop.interpreted JOB.json

The first prints, as JSON, how far losses and gradients of tiny models are from those without the kernels; the
second trains one rank of a job, under torchrun's environment.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from estimator.engines.liger import FAMILIES
from launchers import engines
from launchers.dataset.batches import collate, summed_cross_entropy
from launchers.engines.loop import liger
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs
from tests.launchers.engines.loop.families import network


@triton.jit  # type: ignore[untyped-decorator]
def _rsqrt(x: Any) -> Any:
    return 1 / tl.sqrt(x)


def extend_interpreter() -> None:
    """Add what the interpreter lacks: float arguments, and the square root of CUDA."""
    import liger_kernel.ops.rms_norm as norms

    convert: Any = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    norms.rsqrt = _rsqrt


def distances() -> dict[str, tuple[float, float]]:
    """Compare with the code of the models, by family, with all kernels and with only that of the loss.

    Returns the distances of loss and gradients, relative to the largest of each.
    """
    batch = collate(runs.documents(2), 0)
    distance_by_layer = {}
    for family, loss_alone in itertools.product(FAMILIES, (False, True)):
        model = network(family).train()
        loss = summed_cross_entropy(model(**batch.inputs, use_cache=False).logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        expected = {name: each.grad for name, each in model.named_parameters()}
        model.zero_grad()
        liger.put_in(model, loss_alone=loss_alone)
        computed = liger.summed_loss(model, batch.labels, batch.inputs)
        computed.backward()  # type: ignore[no-untyped-call]
        apart = max(
            float((each.grad - expected[name]).abs().max() / expected[name].abs().max())
            for name, each in model.named_parameters()
        )
        with torch.no_grad():
            batch_loss = liger.summed_loss(model.eval(), batch.labels, batch.inputs)
        off = max(abs(float(each) / float(loss) - 1) for each in (computed, batch_loss))
        distance_by_layer[f"{family}{' loss' if loss_alone else ''}"] = (off, apart)
    return distance_by_layer


if __name__ == "__main__":
    extend_interpreter()
    if sys.argv[1] == "families":
        print(json.dumps(distances()))
    else:
        job = TrainJob.load(Path(sys.argv[1]))
        engines.get(job.plan.engine).train(job)
