"""Options of ``finetune estimate`` as dataclasses, one per group; estimator/cli/steps.py interprets them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from estimator import token_counts, vocabulary
from estimator.cli.common import common, option
from estimator.cli.help import GROUPS, MORE
from estimator.errors import UserError
from estimator.models.vision import IMAGE_SIDE

if TYPE_CHECKING:
    from estimator.throughput import MeasuredBandwidth

OF_LOW_RANK = ("lora_rank", "lora_targets", "lora_experts", "trained_modules")  # fields for LoRA only
_ENGINES = "the engine's"  # default of options that follow the engine
_TRAINING, _WHERE = GROUPS[2:4]
_ADAPT, _STEP, _SHARD, _PLACE = (
    MORE + name for name in ("model and adapters", "training step", "sharding and parallelism", "hardware")
)


# Options of both ``finetune plan`` and ``finetune estimate``
BusbwIntra = Annotated[float | None, option(_PLACE, "Measured bus bandwidth inside a node, in GB/s.")]
BusbwInter = Annotated[float | None, option(_PLACE, "Measured bus bandwidth between nodes, in GB/s per GPU.")]
Hardware = Annotated[Path | None, option(_PLACE, "CSV file with your own GPUs and machines.")]
Corrected = Annotated[
    bool,
    option(
        _PLACE, "Correct predictions by the measurements of finished runs.", "--calibration/--no-calibration"
    ),
]


def one_of(values: Iterable[str], text: str) -> str:
    """Format a help text that lists the values of an option."""
    return f"{text} {', '.join(values)}."


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOptions:
    """Options of a training step that are the same for ``finetune plan`` and ``finetune estimate``."""

    model: Annotated[str, common("model", "--model", "-m")]
    task: Annotated[str, common("task")] = "sft"
    seq_len: Annotated[int | None, common("seq_len")] = None
    resolution: Annotated[
        int | None, option(_ADAPT, "Image side in pixels [default: that of the published model]")
    ] = None
    lora_experts: Annotated[
        bool, option(_ADAPT, "Apply LoRA to the experts of a mixture-of-experts model.", "--lora-experts")
    ] = False
    adapter_only: Annotated[
        bool, option(_ADAPT, "Export the adapter without merging it into the model.", "--adapter-only")
    ] = False
    trained_modules: Annotated[
        str,
        option(
            _ADAPT,
            one_of(vocabulary.TRAINED_MODULES, "Modules trained in full next to adapters:"),
            "--modules-to-save",
        ),
    ] = ""
    adapter_prompt_length: Annotated[
        int, option(_ADAPT, "LLaMA-Adapter: number of prompt vectors per block.")
    ] = 10
    adapter_start_layer: Annotated[int, option(_ADAPT, "LLaMA-Adapter: first block with a prompt.")] = 2
    vision: Annotated[
        str | None, option(_STEP, "Train on images, with the vision tower frozen, lora or full.")
    ] = None
    images_per_row: Annotated[int, option(_STEP, "Images in a sequence, with --vision.")] = 1
    image_size: Annotated[int, option(_STEP, "Side of a square image in pixels, with --vision.")] = IMAGE_SIDE
    variable_length: Annotated[
        bool | None,
        option(
            _STEP,
            "Separate documents by their lengths, without padding and mask [default: on GPUs where tested]",
            "--variable-length/--no-variable-length",
        ),
    ] = None
    optimizer_in_backward: Annotated[
        bool,
        option(
            _STEP,
            "Apply the optimizer during the backward pass, freeing each gradient immediately.",
            "--optimizer-in-backward",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.vision is None and (self.images_per_row, self.image_size) != (1, IMAGE_SIDE):
            raise UserError("--images-per-row and --image-size need --vision.", "Add --vision frozen.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupOptions(SharedOptions):
    """Options that describe one training step. None: default of the engine (EngineDefaults)."""

    engine: Annotated[str, common("engine", choices=(*get_args(vocabulary.Engine), "auto"))] = "auto"
    engine_version: Annotated[
        str, option(_ADAPT, "Older engine version whose code differs, such as torchtitan 2024-05.")
    ] = ""
    method: Annotated[str, common("method", choices=(*vocabulary.METHODS, "auto"))] = "auto"
    lora_rank: Annotated[int | None, common("lora_rank")] = None
    lora_targets: Annotated[
        str | None,
        option(
            _ADAPT, "Linear layers with LoRA: comma-separated names, or all-linear [default: the engine's]"
        ),
    ] = None
    reference_copy: Annotated[
        bool,
        option(
            _ADAPT,
            "Full training on preferences: hold a frozen copy of the model as reference, as TRL does.",
            "--reference-copy",
        ),
    ] = False
    reward_parameters: Annotated[
        int, option(_ADAPT, "Parameters of the reward model that scores grpo's answers. 0: none.")
    ] = 0
    quantization: Annotated[
        str | None, common("quantization", choices=get_args(vocabulary.Quantization), unset=_ENGINES)
    ] = None
    upcast_frozen: Annotated[
        bool,
        option(
            _ADAPT,
            "Keep the frozen model's 16-bit parameters in fp32, like PEFT's prepare_model_for_kbit_training.",
            "--upcast-frozen",
        ),
    ] = False
    undivided_base: Annotated[
        bool, option(_ADAPT, "With ZeRO-3: do not shard the quantized weights.", "--undivided-base")
    ] = False
    looped_experts: Annotated[
        bool, option(_ADAPT, "Compute experts one after another, like transformers 4.", "--looped-experts")
    ] = False
    dispatch_by_expert: Annotated[
        bool | None,
        option(
            _ADAPT,
            "Send a token once for each of its experts (all-to-all) instead of once to each process.",
            "--dispatch-by-expert/--no-dispatch-by-expert",
        ),
    ] = None
    precision: Annotated[
        str | None, common("precision", choices=get_args(vocabulary.Precision), unset=_ENGINES)
    ] = None
    average: Annotated[
        bool, option(_ADAPT, "Keep an exponential moving average of the weights.", "--ema")
    ] = False
    encoders: Annotated[
        bool,
        option(
            _ADAPT, "Keep VAE and text encoders in memory, instead of precomputing latents.", "--encoders"
        ),
    ] = False
    fp8: Annotated[
        str, option(_STEP, one_of(get_args(vocabulary.Fp8), "Scaling of float8 matrix products:"))
    ] = "none"
    optimizer: Annotated[str, common("optimizer", choices=get_args(vocabulary.Optimizer))] = "adamw"
    fused_optimizer: Annotated[
        bool | None,
        option(
            _STEP,
            "AdamW in torch: fused kernel, or foreach implementation [default: the engine's]",
            "--fused-optimizer/--foreach-optimizer",
        ),
    ] = None

    nodes: Annotated[int, common("nodes")] = 1
    gpus: Annotated[int | None, common("gpus", unset="1, or all of the machine")] = None
    sharding: Annotated[
        str | None,
        option(
            _WHERE, one_of(get_args(vocabulary.Sharding), "Sharding of the model states:"), unset=_ENGINES
        ),
    ] = None
    flat_parameters: Annotated[bool, option(_SHARD, "Shard with FSDP1, not FSDP2.", "--flat-parameters")] = (
        False
    )
    shard: Annotated[int | None, option(_SHARD, "GPUs that shard one copy of the model states.")] = None
    dp_replicate: Annotated[int | None, option(_SHARD, "Replicas of the sharded model states.")] = None
    tp: Annotated[int, option(_WHERE, "Degree of tensor parallelism.")] = 1
    sequence_parallel: Annotated[
        bool | None,
        option(
            _SHARD,
            "Use sequence parallelism together with tensor parallelism.",
            "--sequence-parallel/--no-sequence-parallel",
        ),
    ] = None
    cp: Annotated[int, option(_SHARD, "Degree of context parallelism.")] = 1
    pp: Annotated[int, option(_SHARD, "Degree of pipeline parallelism.")] = 1
    virtual_stages: Annotated[int, option(_SHARD, "Model chunks per pipeline stage.")] = 1
    schedule: Annotated[
        str | None, option(_SHARD, one_of(get_args(vocabulary.Schedule), "Pipeline schedule:"))
    ] = None
    ep: Annotated[int, option(_SHARD, "Degree of expert parallelism.")] = 1

    micro_batch_size: Annotated[int, common("micro_batch_size")] = 1
    accumulation: Annotated[
        int | None, option(_TRAINING, "Forward passes per optimizer step (gradient accumulation).")
    ] = None
    packing: Annotated[bool | None, common("packing")] = None
    longest_first: Annotated[
        bool | None,
        option(_STEP, "Train on the longest rows first, or in any order.", "--longest-first/--any-order"),
    ] = None
    expandable_segments: Annotated[
        bool | None,
        option(
            _STEP,
            "Whether PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True.",
            "--expandable-segments/--fixed-segments",
        ),
    ] = None
    longest_once: Annotated[
        bool, option(_STEP, "Assume that one batch has full length.", "--longest-once")
    ] = False
    document_mask: Annotated[
        bool | None,
        option(_STEP, "Mask attention between packed samples.", "--document-mask/--no-document-mask"),
    ] = None
    document_tokens: Annotated[
        int | None,
        option(
            _STEP,
            "Mean length of packed documents in tokens, weighted by length; attention stays within each "
            "[default: the sequence length]",
        ),
    ] = None

    activation_checkpointing: Annotated[bool | None, common("activation_checkpointing", unset=_ENGINES)] = (
        None
    )
    recompute_what: Annotated[
        str | None,
        option(_STEP, "What activation checkpointing recomputes: full or selective [default: the engine's]"),
    ] = None
    recompute_every: Annotated[int, option(_STEP, "Recompute one of every N blocks.")] = 1
    activation_offload: Annotated[
        bool, option(_STEP, "Offload activations to host memory.", "--activation-offload")
    ] = False
    compile: Annotated[
        bool | None,
        option(
            _STEP,
            "Compile the model with torch.compile.",
            "--compile/--no-compile",
            unset="on GPUs where tested",
        ),
    ] = None
    loss: Annotated[
        str | None,
        option(_STEP, one_of(get_args(vocabulary.LossKind), "Loss implementation:"), unset=_ENGINES),
    ] = None
    loss_chunks: Annotated[int | None, option(_STEP, "Number of chunks of the chunked loss.")] = None
    attention: Annotated[
        str, option(_STEP, "Attention kernel: flash, or math (stores all attention scores).")
    ] = "flash"
    flash_version: Annotated[int, option(_STEP, "Version of FlashAttention (PyTorch has 2).")] = 2
    offload: Annotated[
        str, option(_SHARD, one_of(get_args(vocabulary.StateOffload), "Offload to host memory or disk:"))
    ] = "none"
    offload_to: Annotated[str, option(_SHARD, "Storage of offloaded states: cpu, nvme.")] = "cpu"
    keep_checkpoints: Annotated[int, option(_STEP, "Number of checkpoints kept on disk.")] = 2
    device: Annotated[str, option(_WHERE, one_of(get_args(vocabulary.Device), "Training device:"))] = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOptions:
    """Options that describe the hardware of a training step."""

    gpu: Annotated[str | None, common("gpu")] = None
    instance_type: Annotated[str | None, common("instance_type")] = None
    network_gbps: Annotated[float | None, option(_PLACE, "Network bandwidth per node, in Gbit/s.")] = None
    rdma: Annotated[
        bool | None,
        option(_PLACE, "Whether the network has RDMA (InfiniBand, EFA or RoCE).", "--rdma/--no-rdma"),
    ] = None
    busbw_intra: BusbwIntra = None
    busbw_inter: BusbwInter = None
    tokens: Annotated[str | None, common("tokens")] = None
    hardware: Hardware = None
    calibration: Corrected = True


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


def methods_of(options: SharedOptions) -> tuple[vocabulary.LaunchedMethod, ...]:
    """Return the methods that "auto" may take: those to which all options that are set apply."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    is_set = any(values[name] not in (None, False, "") for name in (*OF_LOW_RANK, "adapter_only"))
    return vocabulary.automatic_methods(
        low_rank=is_set, quantized=values["quantization"] not in (None, "none")
    )


def names_of(text: str) -> tuple[str, ...]:
    """Split a comma-separated option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def tokens_of(text: str, option: str = "--tokens") -> float:
    """Parse a number of tokens: 250M, 1.5B, 1e9. Raises UserError that names the option."""
    value = token_counts.parse(text)
    if value is None:
        raise UserError(f"{option} {text} is not a number of tokens.", "Write 250M, 1.5B or 1e9.")
    return value


def bandwidth_of(intra: float | None, inter: float | None) -> MeasuredBandwidth | None:
    """Return the bandwidth set by ``--busbw-intra`` and ``--busbw-inter``; None without them.

    Raises UserError unless it is above 0.
    """
    for name, value in (("--busbw-intra", intra), ("--busbw-inter", inter)):
        if value is not None and value <= 0:
            raise UserError(f"{name} {value:g} must be above 0 GB/s.", "Leave it out if it is unknown.")
    if intra is None and inter is None:
        return None
    from datetime import date

    from estimator.throughput import MeasuredBandwidth

    return MeasuredBandwidth(
        intra_node_gbytes_per_s=intra,
        inter_node_gbytes_per_s=inter,
        source="from --busbw-intra and --busbw-inter",
        date=date.today().isoformat(),
    )
