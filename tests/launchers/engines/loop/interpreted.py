"""The real kernels of Liger-Kernel on a CPU, in the interpreter of Triton, in a separate process.

    TRITON_INTERPRET=1 python -m tests.launchers.engines.loop.interpreted families
    TRITON_INTERPRET=1 python -m tests.launchers.engines.loop.interpreted JOB.json

The first prints, as JSON, how far losses and gradients of tiny models are from those without the kernels; the
second trains one rank of a job, under torchrun's environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from estimator.engines.liger import BLOCK_FAMILIES, FAMILIES
from launchers import engines
from launchers.dataset.batches import collate, summed_cross_entropy
from launchers.engines.loop import head, liger
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs
from tests.launchers.engines.loop.families import LOGIT_SCALES, network


@triton.jit  # type: ignore[untyped-decorator]
def _rsqrt(x: Any) -> Any:
    return 1 / tl.sqrt(x)


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x: Any) -> Any:
    return 1 - 2 / (tl.exp(2 * x) + 1)


def extend_interpreter() -> None:
    """Add what the interpreter lacks: float arguments, and CUDA's square root and hyperbolic tangent."""
    import liger_kernel.ops.cross_entropy as losses
    import liger_kernel.ops.rms_norm as norms

    convert: Any = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.core.tensor(handle, tl.float32)

    interpreter._implicit_cvt = with_floats
    norms.rsqrt, losses.tanh = _rsqrt, _tanh


def distances() -> dict[str, tuple[float, float]]:
    """Compare the loss of each family, and the block kernels of those that have any, with the model's code.

    Returns the distances of loss and gradients, relative to the largest of each.
    """
    cases = [(family, False) for family in (*FAMILIES, "cohere")] + [
        (family, True) for family in BLOCK_FAMILIES
    ]
    return {
        f"{family}{' blocks' if in_blocks else ''}": _distance(family, in_blocks=in_blocks)
        for family, in_blocks in cases
    }


def _distance(family: str, *, in_blocks: bool) -> tuple[float, float]:
    batch = collate(runs.documents(2), 0)
    model = network(family, **LOGIT_SCALES.get(family, {})).train()
    loss = summed_cross_entropy(model(**batch.inputs, use_cache=False).logits, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    if in_blocks:
        liger.use_block_kernels(model)
    head.put_in(model, per_token=False)
    computed = head.loss(model, batch.labels, batch.inputs)
    computed.backward()  # type: ignore[no-untyped-call]
    largest = max(gradient.abs().max() for gradient in expected.values())
    apart = max(
        float(
            (model.get_parameter(name).grad - gradient).abs().max()
            / max(gradient.abs().max(), 1e-3 * largest)
        )
        for name, gradient in expected.items()
    )
    with torch.no_grad():
        evaluated = head.loss(model.eval(), batch.labels, batch.inputs)
    return max(abs(float(each) / float(loss) - 1) for each in (computed, evaluated)), apart


if __name__ == "__main__":
    extend_interpreter()
    if sys.argv[1] == "families":
        print(json.dumps(distances()))
    else:
        job = TrainJob.load(Path(sys.argv[1]))
        engines.get(job.plan.engine).train(job)
