"""Options of ``finetune estimate`` as dataclasses, one per group; estimator/cli/steps.py interprets them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option

from estimator import token_counts, vocabulary
from estimator.cli.common import common
from estimator.cli.help import GROUPS, MORE
from estimator.errors import UserError

_TRAINING, _WHERE = GROUPS[2:4]
_ADAPT, _STEP, _SHARD, _PLACE = (
    MORE + name for name in ("model and adapters", "training step", "sharding and parallelism", "hardware")
)


def one_of(values: Iterable[str], text: str) -> str:
    """Format a help text that lists the values of an option."""
    return f"{text} {', '.join(values)}."


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupOptions:
    """Options that describe one training step. None: default of the engine (EngineDefaults)."""

    model: Annotated[str, common("model", "--model", "-m")]
    engine: Annotated[str, common("engine", choices=(*get_args(vocabulary.Engine), "auto"))] = "auto"
    engine_version: Annotated[
        str,
        Option(
            help="Older engine version whose code differs, such as torchtitan 2024-05.",
            rich_help_panel=_ADAPT,
        ),
    ] = ""
    method: Annotated[str, common("method", choices=(*vocabulary.METHODS, "auto"))] = "auto"
    task: Annotated[str, common("task")] = "sft"
    lora_rank: Annotated[int | None, common("lora_rank")] = None
    lora_targets: Annotated[
        str | None,
        Option(help="Linear layers with LoRA: comma-separated names, or all-linear.", rich_help_panel=_ADAPT),
    ] = None
    reference_copy: Annotated[
        bool,
        Option(
            "--reference-copy",
            help="Full training of pairs holds the reference as a frozen copy, as TRL does.",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    reward_parameters: Annotated[
        int,
        Option(
            help="Parameters of the reward model that scores grpo's answers. 0: none.",
            rich_help_panel=_ADAPT,
        ),
    ] = 0
    lora_experts: Annotated[
        bool,
        Option(
            "--lora-experts",
            help="Apply LoRA to the experts of a mixture-of-experts model.",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    adapter_only: Annotated[
        bool,
        Option(
            "--adapter-only",
            help="Export the adapter without merging it into the model.",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    adapter_prompt_length: Annotated[
        int, Option(help="LLaMA-Adapter: number of prompt vectors per block.", rich_help_panel=_ADAPT)
    ] = 10
    adapter_start_layer: Annotated[
        int, Option(help="LLaMA-Adapter: first block with a prompt.", rich_help_panel=_ADAPT)
    ] = 2
    trained_modules: Annotated[
        str | None,
        Option(
            "--modules-to-save",
            help=one_of(vocabulary.TRAINED_MODULES, "Modules trained in full next to adapters:"),
            rich_help_panel=_ADAPT,
        ),
    ] = None
    quantization: Annotated[str | None, common("quantization", choices=get_args(vocabulary.Quantization))] = (
        None
    )
    upcast_frozen: Annotated[
        bool,
        Option(
            "--upcast-frozen",
            help="Keep the base's 16-bit parts in fp32, like PEFT's k-bit preparation.",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    undivided_base: Annotated[
        bool,
        Option(
            "--undivided-base",
            help="Do not shard the quantized weights (ZeRO-3 cannot).",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    precision: Annotated[str | None, common("precision", choices=get_args(vocabulary.Precision))] = None
    average: Annotated[
        bool,
        Option("--ema", help="Keep a moving average of the weights.", rich_help_panel=_ADAPT),
    ] = False
    encoders: Annotated[
        bool,
        Option(
            "--encoders",
            help="Keep VAE and text encoders in memory, instead of precomputing latents.",
            rich_help_panel=_ADAPT,
        ),
    ] = False
    fp8: Annotated[
        str,
        Option(
            help=one_of(get_args(vocabulary.Fp8), "Scaling of float8 matrix products:"),
            rich_help_panel=_STEP,
        ),
    ] = "none"
    optimizer: Annotated[str, common("optimizer", choices=get_args(vocabulary.Optimizer))] = "adamw"
    fused_optimizer: Annotated[
        bool | None,
        Option(
            "--fused-optimizer/--foreach-optimizer",
            help="Use the fused kernel of AdamW, or torch's foreach implementation.",
            rich_help_panel=_STEP,
        ),
    ] = None

    nodes: Annotated[int, common("nodes")] = 1
    gpus: Annotated[int | None, common("gpus")] = None
    sharding: Annotated[
        str | None,
        Option(
            help=one_of(get_args(vocabulary.Sharding), "Sharding of the model states:"),
            rich_help_panel=_WHERE,
        ),
    ] = None
    flat_parameters: Annotated[
        bool, Option("--flat-parameters", help="FSDP1 instead of FSDP2.", rich_help_panel=_SHARD)
    ] = False
    shard: Annotated[
        int | None,
        Option(help="GPUs that shard one copy of the model states.", rich_help_panel=_SHARD),
    ] = None
    dp_replicate: Annotated[
        int | None, Option(help="Replicas of the sharded model states.", rich_help_panel=_SHARD)
    ] = None
    tp: Annotated[int, Option(help="Degree of tensor parallelism.", rich_help_panel=_WHERE)] = 1
    sequence_parallel: Annotated[
        bool | None,
        Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Use sequence parallelism together with tensor parallelism.",
            rich_help_panel=_SHARD,
        ),
    ] = None
    cp: Annotated[int, Option(help="Degree of context parallelism.", rich_help_panel=_SHARD)] = 1
    pp: Annotated[int, Option(help="Degree of pipeline parallelism.", rich_help_panel=_SHARD)] = 1
    virtual_stages: Annotated[
        int, Option(help="Model chunks per pipeline stage.", rich_help_panel=_SHARD)
    ] = 1
    schedule: Annotated[
        str | None,
        Option(help=one_of(get_args(vocabulary.Schedule), "Pipeline schedule:"), rich_help_panel=_SHARD),
    ] = None
    ep: Annotated[int, Option(help="Degree of expert parallelism.", rich_help_panel=_SHARD)] = 1

    micro_batch_size: Annotated[int, common("micro_batch_size")] = 1
    accumulation: Annotated[
        int | None,
        Option(help="Forward passes per optimizer step (gradient accumulation).", rich_help_panel=_TRAINING),
    ] = None
    seq_len: Annotated[int | None, common("seq_len")] = None
    resolution: Annotated[
        int | None,
        Option(help="Image side in pixels. Default: that of the published model.", rich_help_panel=_ADAPT),
    ] = None
    packing: Annotated[bool | None, common("packing")] = None
    vision: Annotated[
        str | None,
        Option(
            help="Train a vision-language model on images; tower frozen, lora or full.", rich_help_panel=_STEP
        ),
    ] = None
    images_per_row: Annotated[
        int | None, Option(help="Images in a sequence, with --vision.", rich_help_panel=_STEP)
    ] = None
    image_size: Annotated[
        int | None, Option(help="Side of a square image in pixels, with --vision.", rich_help_panel=_STEP)
    ] = None
    longest_first: Annotated[
        bool | None,
        Option(
            "--longest-first/--any-order",
            help="Train on the longest batch first.",
            rich_help_panel=_STEP,
        ),
    ] = None
    expandable_segments: Annotated[
        bool | None,
        Option(
            "--expandable-segments/--fixed-segments",
            help="PYTORCH_CUDA_ALLOC_CONF of the CUDA caching allocator.",
            rich_help_panel=_STEP,
        ),
    ] = None
    longest_once: Annotated[
        bool,
        Option("--longest-once", help="Only one batch has the full length.", rich_help_panel=_STEP),
    ] = False
    document_mask: Annotated[
        bool | None,
        Option(
            "--document-mask/--no-document-mask",
            help="Mask attention between packed samples.",
            rich_help_panel=_STEP,
        ),
    ] = None

    activation_checkpointing: Annotated[
        bool | None,
        common("activation_checkpointing"),
    ] = None
    recompute_what: Annotated[
        str,
        Option(
            help="What activation checkpointing recomputes: full or selective.",
            rich_help_panel=_STEP,
        ),
    ] = "full"
    recompute_every: Annotated[
        int, Option(help="Checkpoint one of every N blocks.", rich_help_panel=_STEP)
    ] = 1
    activation_offload: Annotated[
        bool,
        Option("--activation-offload", help="Offload activations to host memory.", rich_help_panel=_STEP),
    ] = False
    compile: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="Compile the model with torch.compile.", rich_help_panel=_STEP),
    ] = None
    loss: Annotated[
        str | None,
        Option(help=one_of(get_args(vocabulary.LossKind), "Loss implementation:"), rich_help_panel=_STEP),
    ] = None
    loss_chunks: Annotated[
        int | None, Option(help="Number of chunks of the chunked loss.", rich_help_panel=_STEP)
    ] = None
    attention: Annotated[
        str,
        Option(
            help="Attention kernel: flash, or math (stores all attention scores).",
            rich_help_panel=_STEP,
        ),
    ] = "flash"
    flash_version: Annotated[
        int, Option(help="Version of FlashAttention (PyTorch has 2).", rich_help_panel=_STEP)
    ] = 2
    optimizer_in_backward: Annotated[
        bool,
        Option(
            "--optimizer-in-backward",
            help="Apply the optimizer during the backward pass, freeing each gradient immediately.",
            rich_help_panel=_STEP,
        ),
    ] = False
    offload: Annotated[
        str,
        Option(
            help=one_of(get_args(vocabulary.StateOffload), "Offload to host memory or disk:"),
            rich_help_panel=_SHARD,
        ),
    ] = "none"
    offload_to: Annotated[
        str, Option(help="Where offloaded states are stored: cpu, nvme.", rich_help_panel=_SHARD)
    ] = "cpu"
    keep_checkpoints: Annotated[
        int, Option(help="Number of checkpoints kept on disk.", rich_help_panel=_STEP)
    ] = 2
    device: Annotated[
        str, Option(help=one_of(get_args(vocabulary.Device), "Training device:"), rich_help_panel=_WHERE)
    ] = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOptions:
    """Options that describe the hardware of a training step."""

    gpu: Annotated[str | None, common("gpu")] = None
    instance_type: Annotated[str | None, common("instance_type")] = None
    network_gbps: Annotated[
        float | None, Option(help="Network bandwidth per node, in Gbit/s.", rich_help_panel=_PLACE)
    ] = None
    rdma: Annotated[
        bool | None,
        Option(
            "--rdma/--no-rdma",
            help="Whether the network has RDMA (InfiniBand, EFA or RoCE).",
            rich_help_panel=_PLACE,
        ),
    ] = None
    busbw_intra: Annotated[
        float | None,
        Option(help="Measured bus bandwidth inside a node, in GB/s.", rich_help_panel=_PLACE),
    ] = None
    busbw_inter: Annotated[
        float | None,
        Option(help="Measured bus bandwidth between nodes, in GB/s per GPU.", rich_help_panel=_PLACE),
    ] = None
    tokens: Annotated[str | None, common("tokens")] = None
    hardware: Annotated[
        Path | None, Option(help="CSV file with your own GPUs and machines.", rich_help_panel=_PLACE)
    ] = None
    calibration: Annotated[
        bool,
        Option(
            "--calibration/--no-calibration",
            help="Correct predictions by the measurements of finished runs.",
            rich_help_panel=_PLACE,
        ),
    ] = True


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that each field of a dataclass parameter becomes an option.

    typer would take a dataclass for one argument. So the signature gets the fields instead, and the dataclass
    is built when the command is called.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def command(**values: Any) -> None:
        options = {
            name: kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**options, **values)

    functools.update_wrapper(command, function)
    del command.__wrapped__  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters_of(kind: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]


def tokens_of(text: str) -> float:
    """Parse a number of tokens: 250M, 1.5B, 1e9. Raises UserError."""
    value = token_counts.parse(text)
    if value is None:
        raise UserError(f"--tokens {text} is not a number of tokens.", "Write 250M, 1.5B or 1e9.")
    return value
