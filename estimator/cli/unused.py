"""Options of ``finetune plan`` and ``finetune estimate`` that have no effect with the other options."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from estimator.cli.options import OF_LOW_RANK
from estimator.engines import varlen
from estimator.engines.setups import no_variable_length
from estimator.errors import UserError
from estimator.option_names import option_name
from estimator.vocabulary import METHODS, QUANTIZATIONS, SHARDINGS, TASKS

if TYPE_CHECKING:
    from estimator.cli.options import PlaceOptions, SetupOptions, SharedOptions
    from estimator.cli.plan_options import GoalOptions, JobOptions
    from estimator.setup import Setup

_OF_LLAMA_ADAPTER = ("adapter_prompt_length", "adapter_start_layer")


def check_plan(options: JobOptions) -> None:
    """Raise UserError for the first option of a job that has no effect with its method or engine."""
    if options.method in METHODS:
        _refuse(
            _of_other_methods(options.method),
            options,
            f"does not apply to --method {options.method}",
        )
        if not METHODS[options.method].quantized:
            _refuse(
                ("quantization",),
                options,
                f"does not apply to --method {options.method}",
                "use --method qlora",
            )
    else:
        _refuse(_OF_LLAMA_ADAPTER, options, "does not apply to --method auto", "use --method adapter-v2")
    if options.engine not in ("auto", "deepspeed"):
        _refuse(
            ("zero_offload",),
            options,
            f"does not apply to --engine {options.engine}",
            "use --engine deepspeed",
        )
    if options.engine not in ("auto", "fsdp2"):
        _refuse(
            ("fsdp_offload",), options, f"does not apply to --engine {options.engine}", "use --engine fsdp2"
        )
    if options.activation_checkpointing is False:
        _refuse(
            ("recompute_what", "recompute_every"), options, "does not apply to --no-activation-checkpointing"
        )


def check_goals(options: GoalOptions) -> None:
    """Raise UserError for two options of which only one would be used."""
    for first, second in (("tokens", "dataset_tokens"), ("tokens", "epochs")):
        if getattr(options, first) is not None and getattr(options, second) is not None:
            raise UserError(
                f"{option_name(first)} and {option_name(second)} both set the amount of training.",
                "Remove one of them.",
            )
    if options.nodes is not None and options.max_nodes is not None and options.nodes > options.max_nodes:
        raise UserError(
            f"--nodes {options.nodes} is more than --max-nodes {options.max_nodes}.", "Remove one of them."
        )


def check_estimate(options: SetupOptions, place: PlaceOptions, setup: Setup) -> None:
    """Raise UserError for the first option that has no effect on ``setup``, the step of these options."""
    _refuse(_of_other_methods(setup.method), options, f"does not apply to --method {setup.method}")
    task = TASKS[setup.task]
    for is_used, names, needed in (
        (setup.quantization in QUANTIZATIONS, ("upcast_frozen", "undivided_base"), "--method qlora"),
        (task.compares and not setup.adapters, ("reference_copy",), "--task dpo and --method full"),
        (task.draws_answers, ("reward_parameters",), "--task grpo"),
        (bool(setup.model.experts), ("looped_experts",), "a mixture of experts"),
        (setup.expert > 1, ("dispatch_by_expert",), "--expert above 1"),
        (setup.optimizer == "adamw", ("fused_optimizer",), "--optimizer adamw"),
        (SHARDINGS[setup.sharding].fsdp, ("flat_parameters",), "--sharding fsdp on several GPUs"),
        (setup.tensor > 1, ("sequence_parallel",), "--tp"),
        (setup.pipeline > 1, ("virtual_stages", "schedule"), "--pp"),
        (setup.fixed_length, ("document_tokens", "document_mask"), "--packing"),
        (
            setup.checkpointing != "none",
            ("recompute_what", "recompute_every"),
            "--activation-checkpointing",
        ),
        (setup.attention == "flash", ("flash_version",), "--attention flash"),
        (setup.offload != "none", ("offload_to",), "--offload"),
        (setup.loss not in ("plain", "kernel"), ("loss_chunks",), "--loss chunked"),
    ):
        if not is_used:
            _refuse(names, options, f"has no effect without {needed}")
    if options.variable_length and not setup.variable_length:
        step = (setup.engine, setup.device, setup.model, setup.task, setup.method, setup.precision)
        reason = varlen.OF_IMAGES if setup.vision else no_variable_length(*step)
        raise UserError(f"--variable-length does not apply: {reason}.", "Remove it.")
    if setup.nodes == 1:
        _refuse(("network_gbps", "rdma", "busbw_inter"), place, "has no effect on one node", "add --nodes")
    if setup.world_size == 1:
        _refuse(("busbw_intra",), place, "has no effect on one GPU", "add --gpus")


def _of_other_methods(name: str) -> tuple[str, ...]:
    """Return the fields of adapters that the method does not have."""
    method = METHODS[name]
    fields: tuple[str, ...] = () if method.low_rank else OF_LOW_RANK
    fields += () if method.adapters else ("adapter_only",)
    return fields + (() if method.llama_adapter else _OF_LLAMA_ADAPTER)


def _refuse(
    names: tuple[str, ...], options: SharedOptions | PlaceOptions, reason: str, advice: str = ""
) -> None:
    """Raise UserError if one of the fields is set. ``reason``: a clause without its subject."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in names:
        value = getattr(options, name)
        if value is not False and value != defaults[name]:
            raise UserError(
                f"{option_name(name)} {reason}.", f"Remove it, or {advice}." if advice else "Remove it."
            )
