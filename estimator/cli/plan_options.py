"""Options of ``finetune plan`` as dataclasses; estimator/cli/plan.py interprets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from estimator.cli.common import common, option
from estimator.cli.help import GROUPS, MORE
from estimator.cli.options import BusbwInter, BusbwIntra, Corrected, Hardware, SharedOptions
from estimator.vocabulary import PLANNED_ENGINES

_TRAINING, _WHERE = GROUPS[2:4]
_ADAPT, _STEP, _SHARD, _PLACE = (
    MORE + name for name in ("model and adapters", "training step", "sharding and parallelism", "hardware")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions(SharedOptions):
    """Options that describe the training job. None: the planner decides."""

    method: Annotated[str, common("method")] = "auto"
    engine: Annotated[str, common("engine", choices=(*PLANNED_ENGINES, "auto"))] = "auto"
    global_batch_size: Annotated[int | None, common("global_batch_size")] = None
    lora_rank: Annotated[int | None, common("lora_rank")] = None
    lora_targets: Annotated[
        str | None,
        option(_ADAPT, "Linear layers with LoRA: comma-separated names, or all-linear [default: all-linear]"),
    ] = None
    quantization: Annotated[str | None, common("quantization")] = None
    optimizer: Annotated[str, common("optimizer")] = "adamw"

    precision: Annotated[str, common("precision")] = "auto"
    micro_batch_size: Annotated[int | None, common("micro_batch_size")] = None
    activation_checkpointing: Annotated[bool | None, common("activation_checkpointing")] = None
    packing: Annotated[bool | None, common("packing")] = None
    recompute_what: Annotated[
        str | None,
        option(_STEP, "What activation checkpointing recomputes: full or selective [default: the fastest]"),
    ] = None
    recompute_every: Annotated[int | None, option(_STEP, "Recompute one of every N blocks.")] = None
    fp8: Annotated[str, option(_STEP, "Scaling of float8 matrix products (fsdp2): tensorwise, rowwise.")] = (
        "none"
    )
    compile: Annotated[
        bool | None,
        option(
            _STEP,
            "Compile the model with torch.compile [default: on GPUs where tested]",
            "--compile/--no-compile",
        ),
    ] = None
    liger: Annotated[
        bool | None,
        option(
            _STEP,
            "Use the fused kernels of Liger-Kernel [default: on GPUs where tested]",
            "--liger/--no-liger",
        ),
    ] = None
    zero_stage: Annotated[
        int | None, option(_SHARD, "ZeRO stage of DeepSpeed: 0, 1, 2 or 3 [default: the fastest]")
    ] = None
    fsdp_sharding: Annotated[
        str | None,
        option(
            _SHARD,
            "FSDP2 sharding: full, or grad-op (weights stay gathered in the step) [default: the fastest]",
        ),
    ] = None
    fsdp_replicas: Annotated[
        int | None, option(_SHARD, "FSDP2: number of sharded copies of the model (hybrid sharding).")
    ] = None
    zero_offload: Annotated[
        str, option(_SHARD, "DeepSpeed: keep the optimizer in host memory: none, cpu.")
    ] = "none"
    fsdp_offload: Annotated[str, option(_SHARD, "FSDP2: keep all shards in host memory: none, cpu.")] = "none"
    tp: Annotated[int | None, option(_SHARD, "Degree of tensor parallelism.")] = None
    cp: Annotated[int | None, option(_SHARD, "Degree of context parallelism.")] = None
    pp: Annotated[int | None, option(_SHARD, "Degree of pipeline parallelism.")] = None
    ep: Annotated[int | None, option(_SHARD, "Degree of expert parallelism.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalOptions:
    """Options that describe the goal and the hardware."""

    tokens: Annotated[str | None, common("tokens")] = None
    dataset_tokens: Annotated[str | None, option(_TRAINING, "Tokens per epoch, instead of --tokens.")] = None
    epochs: Annotated[int | None, option(_TRAINING, "Passes over the data, with --dataset-tokens.")] = None
    deadline_hours: Annotated[
        float | None, option(_WHERE, "Cheapest plan that finishes within this many hours")
    ] = None
    budget_usd: Annotated[float | None, option(_WHERE, "Fastest plan within this budget in USD")] = None
    prefer: Annotated[str, option(_WHERE, "Rank by price or speed")] = "price"

    gpu: Annotated[str | None, common("gpu")] = None
    instance_type: Annotated[list[str] | None, common("instance_type")] = None
    cloud: Annotated[list[str] | None, common("cloud")] = None
    capacity: Annotated[
        str,
        option(
            _PLACE, "Rank instance types with poor availability last (usual), or treat all equally (any)."
        ),
    ] = "usual"
    spot: Annotated[bool, common("spot")] = False
    interruption_rate: Annotated[
        float | None, option(_PLACE, "With --spot: interruptions per node and hour.")
    ] = None
    nodes: Annotated[int | None, common("nodes")] = None
    gpus: Annotated[int | None, common("gpus")] = None
    max_nodes: Annotated[int | None, option(_PLACE, "Maximum number of nodes [default: 16]")] = None
    max_gpus: Annotated[int | None, option(_PLACE, "Maximum number of GPUs over all nodes.")] = None
    tight: Annotated[
        bool,
        option(
            _PLACE, "Rank plans with a risk of 2 to 20 % of running out of memory like others.", "--tight"
        ),
    ] = False
    here: Annotated[
        bool | None,
        option(_WHERE, "Plan for this machine [default: if it has GPUs]", "--here/--no-here"),
    ] = None
    from_cluster: Annotated[
        bool, option(_WHERE, "Plan for the nodes of your Kubernetes cluster.", "--from-cluster")
    ] = False
    context: Annotated[str | None, option(_PLACE, "With --from-cluster: context of the kubeconfig.")] = None
    namespace: Annotated[
        str | None,
        option(
            _PLACE,
            "With --from-cluster: namespace whose quotas apply [default: $METAFLOW_KUBERNETES_NAMESPACE]",
        ),
    ] = None
    hardware: Hardware = None
    busbw_intra: BusbwIntra = None
    busbw_inter: BusbwInter = None
    calibration: Corrected = True
