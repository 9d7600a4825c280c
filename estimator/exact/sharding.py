"""FSDP2 and tensor parallelism over a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from estimator.exact.built import BuiltModel
from estimator.exact.tracker import Part, StepTracker
from estimator.setup import Setup
from estimator.vocabulary import SHARDINGS


@dataclass(frozen=True, slots=True)
class Meshes:
    """Device meshes: one axis for sharding (two with replicas), one for tensor parallelism."""

    shard: DeviceMesh
    tensor: DeviceMesh


@contextmanager
def fake_processes(setup: Setup) -> Iterator[Meshes | None]:
    """Context with a fake process group. Yields its meshes, or None for a single process."""
    if not (SHARDINGS[setup.sharding].fsdp or setup.tensor > 1):
        yield None
        return
    shape = (setup.replicate, setup.shard, setup.tensor)
    size = setup.replicate * setup.shard * setup.tensor
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
        part = mesh["replicate", "shard"] if setup.replicate > 1 else mesh["shard"]
        with _real_ranks():
            yield Meshes(part, mesh["tensor"])
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_ranks() -> Iterator[None]:
    """Context in which meshes are concatenated from real ranks, as fake tensors have no values."""
    joined = DeviceMesh._concatenate

    def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            mesh: DeviceMesh = joined(meshes)
            return mesh

    with mock.patch.object(DeviceMesh, "_concatenate", concatenated):
        yield


def split_tensors(setup: Setup, built: BuiltModel, meshes: Meshes) -> None:
    """Apply tensor parallelism: torchtune's plan, or torchtitan's with sequence-parallel norms."""
    for block in built.blocks:
        attention: Any = block.attn
        for name in ("num_heads", "num_kv_heads", "embed_dim"):
            setattr(attention, name, getattr(attention, name) // setup.tensor)
    plan = _sequence_plan() if setup.engine == "torchtitan" and setup.sequence_parallel else _plain_plan()
    parallelize_module(built.model, meshes.tensor, plan)


def _plain_plan() -> dict[str, Any]:
    from torchtune.models.llama3 import base_llama_tp_plan

    return dict(base_llama_tp_plan())


class _GatheredNorm(SequenceParallel):
    """Norm on a shard of the sequence whose output is gathered once for all readers."""

    @staticmethod
    def _prepare_output_fn(_local: Any, _module: Any, outputs: Any, device_mesh: Any) -> Any:
        return outputs.redistribute(device_mesh, (Replicate(),)).to_local()


def _sequence_plan() -> dict[str, Any]:
    """torchtitan's plan for Llama (torchtitan/models/llama3/infra/parallelize.py) in torchtune's names."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.sa_norm": _GatheredNorm(),
        "layers.*.attn.q_proj": ColwiseParallel(),
        "layers.*.attn.k_proj": ColwiseParallel(),
        "layers.*.attn.v_proj": ColwiseParallel(),
        "layers.*.attn.output_proj": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp_norm": _GatheredNorm(),
        "layers.*.mlp.w1": ColwiseParallel(),
        "layers.*.mlp.w3": ColwiseParallel(),
        "layers.*.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def shard(setup: Setup, built: BuiltModel, meshes: Meshes) -> None:
    """Apply FSDP2 to each block, and to the other parameters as the root.

    torchtune frees every gathered group after the forward pass (training.shard_model); torchtitan keeps the
    last block and the root, with which the backward pass starts (models/llama3/infra/parallelize.py).
    """
    options: dict[str, Any] = {"mesh": meshes.shard}
    if setup.precision == "bf16-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    frees = setup.sharding == "fsdp"
    keeps_last = setup.engine == "torchtitan"
    for block in built.blocks:
        last = keeps_last and block is built.blocks[-1]
        fully_shard(block, reshard_after_forward=frees and not last, **options)
    fully_shard(built.model, reshard_after_forward=frees and not keeps_last, **options)


@contextmanager
def communication(tracker: StepTracker) -> Iterator[None]:
    """Context in which allocations of FSDP2's gather and reduce count as communication buffers."""
    with ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            method = _as_communication(getattr(FSDPParamGroup, name), tracker)
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, method))
        yield


def _as_communication(original: Any, tracker: StepTracker) -> Any:
    def method(group: Any, *args: Any, **options: Any) -> Any:
        with tracker.during(Part.COMMUNICATION):
            result = original(group, *args, **options)
        for parameter in group.fsdp_params:
            tracker.mark(parameter.sharded_param.grad, Part.GRADIENTS)
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.requires_grad and unsharded not in _followed:
                _followed[unsharded] = unsharded.register_post_accumulate_grad_hook(
                    lambda leaf: tracker.mark(leaf.grad, Part.COMMUNICATION)
                )
        return result

    return method


_followed: Any = torch.utils.weak.WeakIdKeyDictionary()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a parameter as a plain tensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this process's shard, reduced if tensor parallelism did not shard it."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    return gradient
