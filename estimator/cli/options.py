"""Options that several commands share: each group is a dataclass, which estimator/cli/steps.py reads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option

from estimator import setup as fields
from estimator import token_counts
from estimator.cli.defaults import ENGINES
from estimator.errors import UserError

METHODS = ("full", "lora", "qlora", "dora", "qdora", *fields.LLAMA_ADAPTERS)
_WHAT, _SPREAD, _BATCH, _MEMORY, _PLACE = (
    "What is trained",
    "How it is spread",
    "Batch",
    "What saves memory",
    "Where",
)


def _one_of(values: tuple[str, ...], text: str = "") -> str:
    return f"{text} {', '.join(values)}.".strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class SetupOptions:
    """The options that describe one training step. None: as the engine does by default (cli/defaults.py)."""

    model: Annotated[
        str,
        Option(
            "--model", "-m", help="A name of `finetune models`, a Hugging Face id or a directory.",
            rich_help_panel=_WHAT,
        ),
    ]  # fmt: skip
    engine: Annotated[str, Option(help=_one_of(tuple(ENGINES)), rich_help_panel=_WHAT)] = "torchtune"
    engine_version: Annotated[
        str, Option(help="Of an older engine whose code differs, such as torchtitan 2024-05.",
                    rich_help_panel=_WHAT)
    ] = ""  # fmt: skip
    method: Annotated[str, Option(help=_one_of(METHODS), rich_help_panel=_WHAT)] = "full"
    task: Annotated[str, Option(help=_one_of(get_args(fields.Task)), rich_help_panel=_WHAT)] = "sft"
    lora_rank: Annotated[
        int | None, Option("--lora-rank", "--rank", help="Of the adapters.", rich_help_panel=_WHAT)
    ] = None
    lora_targets: Annotated[
        str | None,
        Option(help="Names of linear layers with commas between, or `all`.", rich_help_panel=_WHAT),
    ] = None
    reward_parameters: Annotated[
        int, Option(help="Of the reward model that scores grpo's answers; 0: none.", rich_help_panel=_WHAT)
    ] = 0
    lora_experts: Annotated[
        bool, Option("--lora-experts", help="Adapters on experts too.", rich_help_panel=_WHAT)
    ] = False
    adapter_only: Annotated[
        bool,
        Option("--adapter-only", help="The adapter alone is handed over, not merged.", rich_help_panel=_WHAT),
    ] = False
    adapter_prompt_length: Annotated[
        int, Option(help="Of a LLaMA-Adapter: prompt vectors of a block.", rich_help_panel=_WHAT)
    ] = 10
    adapter_start_layer: Annotated[
        int, Option(help="The first block with a prompt.", rich_help_panel=_WHAT)
    ] = 2
    trained_modules: Annotated[
        str | None,
        Option(help="Trained whole beside adapters: embed_tokens, lm_head, norms.", rich_help_panel=_WHAT),
    ] = None
    quantization: Annotated[
        str | None,
        Option(help=_one_of(get_args(fields.Quantization), "Of the frozen base:"), rich_help_panel=_WHAT),
    ] = None
    upcast_frozen: Annotated[
        bool,
        Option("--upcast-frozen", help="The base's 16-bit parts in fp32, as PEFT's k-bit preparation does.",
               rich_help_panel=_WHAT),
    ] = False  # fmt: skip
    undivided_base: Annotated[
        bool,
        Option("--undivided-base", help="Quantised weights that ZeRO-3 can't divide.", rich_help_panel=_WHAT),
    ] = False
    precision: Annotated[
        str | None, Option(help=_one_of(get_args(fields.Precision)), rich_help_panel=_WHAT)
    ] = None
    average: Annotated[
        bool,
        Option("--ema", help="A moving average of the weights beside them.", rich_help_panel=_WHAT),
    ] = False
    encoders: Annotated[
        bool,
        Option(
            "--encoders",
            help="VAE and text encoders beside the UNet, as without latents computed before.",
            rich_help_panel=_WHAT,
        ),
    ] = False
    fp8: Annotated[
        str, Option(help=_one_of(get_args(fields.Fp8), "Of the products:"), rich_help_panel=_WHAT)
    ] = "none"
    optimizer: Annotated[str, Option(help=_one_of(get_args(fields.Optimizer)), rich_help_panel=_WHAT)] = (
        "adamw"
    )
    fused_optimizer: Annotated[
        bool | None,
        Option("--fused-optimizer/--foreach-optimizer", help="AdamW's kernel, or torch's foreach.",
               rich_help_panel=_WHAT),
    ] = None  # fmt: skip

    nodes: Annotated[int, Option(help="Machines.", rich_help_panel=_SPREAD)] = 1
    gpus: Annotated[
        int | None, Option(help="GPUs of each machine; on CPUs, processes.", rich_help_panel=_SPREAD)
    ] = None
    sharding: Annotated[
        str | None, Option(help=_one_of(get_args(fields.StateSharding)), rich_help_panel=_SPREAD)
    ] = None
    flat_parameters: Annotated[
        bool, Option("--flat-parameters", help="FSDP1 instead of FSDP2.", rich_help_panel=_SPREAD)
    ] = False
    shard: Annotated[
        int | None, Option(help="GPUs that share one copy of the states.", rich_help_panel=_SPREAD)
    ] = None
    dp_replicate: Annotated[int | None, Option(help="Such groups.", rich_help_panel=_SPREAD)] = None
    tp: Annotated[int, Option(help="Tensor parallel.", rich_help_panel=_SPREAD)] = 1
    sequence_parallel: Annotated[
        bool | None,
        Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Beside tensor parallel.",
            rich_help_panel=_SPREAD,
        ),
    ] = None
    cp: Annotated[int, Option(help="Context parallel.", rich_help_panel=_SPREAD)] = 1
    pp: Annotated[int, Option(help="Pipeline parallel.", rich_help_panel=_SPREAD)] = 1
    virtual_stages: Annotated[
        int, Option(help="Model chunks of a pipeline stage.", rich_help_panel=_SPREAD)
    ] = 1
    schedule: Annotated[
        str | None,
        Option(help=_one_of(get_args(fields.Schedule), "Of the pipeline:"), rich_help_panel=_SPREAD),
    ] = None
    ep: Annotated[int, Option(help="Expert parallel.", rich_help_panel=_SPREAD)] = 1

    micro_batch_size: Annotated[
        int, Option(help="Sequences of a GPU and a forward pass.", rich_help_panel=_BATCH)
    ] = 1
    accumulation: Annotated[
        int | None, Option(help="Forward passes of an optimizer step.", rich_help_panel=_BATCH)
    ] = None
    seq_len: Annotated[
        int | None,
        Option(help=f"Tokens of the longest sequence; {fields.DEFAULT_SEQ_LEN:,}.", rich_help_panel=_BATCH),
    ] = None
    resolution: Annotated[
        int | None,
        Option(help="Pixels of an image's side; as the model was published for.", rich_help_panel=_BATCH),
    ] = None
    packed: Annotated[
        bool | None,
        Option("--packed/--variable", help="All of full length, or of their own.", rich_help_panel=_BATCH),
    ] = None
    longest_first: Annotated[
        bool | None,
        Option(
            "--longest-first/--any-order",
            help="Of batches that vary in length, the longest at the beginning.",
            rich_help_panel=_BATCH,
        ),
    ] = None
    expandable_segments: Annotated[
        bool | None,
        Option(
            "--expandable-segments/--fixed-segments",
            help="PYTORCH_CUDA_ALLOC_CONF of the CUDA allocator.",
            rich_help_panel=_BATCH,
        ),
    ] = None
    longest_once: Annotated[
        bool,
        Option("--longest-once", help="Only one batch is that long.", rich_help_panel=_BATCH),
    ] = False
    document_mask: Annotated[
        bool | None,
        Option(
            "--document-mask/--no-document-mask", help="Packed samples kept apart.", rich_help_panel=_BATCH
        ),
    ] = None

    checkpointing: Annotated[
        str | None,
        Option(help=_one_of(get_args(fields.Checkpointing), "Of activations:"), rich_help_panel=_MEMORY),
    ] = None
    recompute_every: Annotated[
        int, Option(help="With checkpointing: one block of so many.", rich_help_panel=_MEMORY)
    ] = 1
    activation_offload: Annotated[
        bool, Option("--activation-offload", help="Activations wait in host memory.", rich_help_panel=_MEMORY)
    ] = False
    compile: Annotated[bool, Option("--compile", help="torch.compile.", rich_help_panel=_MEMORY)] = False
    loss: Annotated[str | None, Option(help=_one_of(get_args(fields.LossKind)), rich_help_panel=_MEMORY)] = (
        None
    )
    loss_chunks: Annotated[int | None, Option(help="Of the chunked loss.", rich_help_panel=_MEMORY)] = None
    attention: Annotated[str, Option(help="flash, or math (keeps all scores).", rich_help_panel=_MEMORY)] = (
        "flash"
    )
    optimizer_in_backward: Annotated[
        bool,
        Option("--optimizer-in-backward", help="Each gradient is used at once.", rich_help_panel=_MEMORY),
    ] = False
    offload: Annotated[str, Option(help="none, optimizer, all.", rich_help_panel=_MEMORY)] = "none"
    offload_to: Annotated[str, Option(help="cpu, nvme.", rich_help_panel=_MEMORY)] = "cpu"
    keep_checkpoints: Annotated[int, Option(help="Kept on disk.", rich_help_panel=_MEMORY)] = 2
    device: Annotated[str, Option(help="cuda, cpu.", rich_help_panel=_PLACE)] = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOptions:
    """The options that say what a training step runs on, and what is known of that place."""

    gpu: Annotated[
        str | None, Option(help="A name of `finetune gpus`: capacity and speed.", rich_help_panel=_PLACE)
    ] = None
    instance_type: Annotated[
        str | None, Option(help="A cloud's machine: GPU, network and price.", rich_help_panel=_PLACE)
    ] = None
    network_gbps: Annotated[
        float | None, Option(help="Of one machine, in Gbit/s.", rich_help_panel=_PLACE)
    ] = None
    rdma: Annotated[
        bool | None,
        Option("--rdma/--no-rdma", help="InfiniBand, EFA or RoCE.", rich_help_panel=_PLACE),
    ] = None
    busbw_intra: Annotated[
        float | None, Option(help="Measured bus bandwidth inside a machine, GB/s.", rich_help_panel=_PLACE)
    ] = None
    busbw_inter: Annotated[
        float | None, Option(help="Measured bus bandwidth over several, GB/s.", rich_help_panel=_PLACE)
    ] = None
    tokens: Annotated[
        str | None,
        Option(help="To train on, for hours and USD: 250M, 1.5B.", rich_help_panel=_PLACE),
    ] = None
    hardware: Annotated[
        Path | None, Option(help="A CSV of your own GPUs and machines.", rich_help_panel=_PLACE)
    ] = None
    calibration: Annotated[
        bool,
        Option("--calibration/--no-calibration", help="Use what finished runs have measured.",
               rich_help_panel=_PLACE),
    ] = True  # fmt: skip


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: a parameter whose type is a dataclass of options becomes an option for each field.

    typer reads a command's signature, in which a dataclass would be one argument. So the command gets a
    signature with the fields in place of the dataclass, and puts the dataclass together when it is called.
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
    """A number of tokens as people write it: 250M, 1.5B, 1e9. Raises UserError."""
    value = token_counts.parse(text)
    if value is None:
        raise UserError(f"--tokens {text} is not a number of tokens.", "Write 250M, 1.5B or 1e9.")
    return value
