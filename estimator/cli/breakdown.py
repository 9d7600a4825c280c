"""finetune estimate --breakdown: bars of memory by category, for one configuration or one option's values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from estimator import calibration, chart_page, charts, models
from estimator.charts import Bar, Chart
from estimator.cli import output
from estimator.cli.answer import ConfigurationEstimate, estimate_configuration
from estimator.cli.options import PlaceOptions, SetupOptions
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_count
from estimator.names import unknown_choice
from estimator.vocabulary import AUTOMATIC_METHODS, Checkpointing

if TYPE_CHECKING:
    from rich.console import Console

# Options that --over can vary, with the default of --values
OVER: dict[str, tuple[str, ...]] = {
    "tp": ("1", "2", "4", "8"),
    "pp": ("1", "2", "4", "8"),
    "cp": ("1", "2", "4", "8"),
    "ep": ("1", "2", "4", "8"),
    "gpus": ("1", "2", "4", "8"),
    "nodes": ("1", "2", "4", "8"),
    "micro_batch_size": ("1", "2", "4", "8"),
    "seq_len": ("1024", "2048", "4096", "8192"),
    "lora_rank": ("8", "16", "64", "256"),
    "activation_checkpointing": get_args(Checkpointing),
    "method": AUTOMATIC_METHODS,
    "engine": ("torchtune", "deepspeed", "torchtitan", "transformers"),
    "sharding": ("ddp", "shard_grad_op", "fsdp"),
    "optimizer": ("adamw", "adamw8bit", "adafactor", "sgd"),
    "precision": ("fp32", "bf16-mixed", "bf16"),
    "loss": ("plain", "chunked", "fused"),
}

CATEGORY_DESCRIPTIONS = {
    "vision tower": "image tower and projector of a vision-language model, with their activations",
    "weights": "model parameters, this process's share of them",
    "master weights": "fp32 copy of the trained parameters, updated by the optimizer",
    "adapters": "parameters added by LoRA, DoRA or a LLaMA-Adapter",
    "reference model": "untrained model that DPO and GRPO compare with",
    "reward model": "model that scores the completions of GRPO",
    "average of the weights": "moving average of the trained parameters, in fp32",
    "VAE and text encoders": "encoders of images and prompts, if latents are not precomputed",
    "text encoders": "text encoders with adapters (images.text_encoders)",
    "KV cache": "keys and values of the tokens during generation",
    "gradients": "one per trained parameter",
    "optimizer": "optimizer states: AdamW keeps two numbers per trained parameter",
    "activations": "tensors saved for the backward pass; grow with batch and length",
    "logits and loss": "scores over the vocabulary per token, and copies in the cross-entropy",
    "communication buffers": "gathered weights and gradients being reduced",
    "optimizer temporaries": "temporary tensors of the optimizer step",
    "quantization overhead": "scales of quantized weights, and the layer being dequantized",
    "runtime": "CUDA context and NCCL; on a CPU, Python and torch",
    "allocator": "fragmentation of the caching allocator when memory is short",
    "calibration": "memory that earlier runs needed beyond the formulas",
}


def show_breakdown(
    options: SetupOptions,
    place: PlaceOptions,
    *,
    over: str | None,
    values: str | None,
    svg: Path | None,
    html: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Print the memory of one configuration by category, or one bar per value of the option ``over``.

    Call it inside :func:`estimator.cli.answer.catalogue`. ``svg`` and ``html``: files for the chart.
    """
    variants = _variants(options, over, values)
    models.resolve(options.model)
    estimates, failed = _estimate_variants(variants, place)
    problems = next(iter(estimates.values())).site.problems
    for line in (*problems, *(f"{name}: {problem}" for name, problem in failed.items())):
        output.note(line)
    chart = chart_of(estimates, over)
    if svg is not None:
        output.write_text(svg, charts.svg(chart))
    if html is not None:
        output.write_text(html, chart_page.html(chart))
    if as_json:
        bars = [{"value": name} | result.to_dict() for name, result in estimates.items()]
        output.print_json({"over": over, "bars": bars, "impossible": failed})
    elif as_csv:
        output.print_csv([{"value": name} | result.to_row() for name, result in estimates.items()])
    else:
        _print(output.console(), chart, estimates)


def _variants(options: SetupOptions, over: str | None, values: str | None) -> dict[str, SetupOptions]:
    """Return the options of each bar by its name. Raises UserError for an invalid value."""
    if over is None:
        if values is not None:
            raise UserError(f"--values {values} needs --over.", f"Add --over with one of {', '.join(OVER)}.")
        return {options.model: options}
    key = over.removeprefix("--").replace("-", "_")
    if key not in OVER:
        raise unknown_choice(f"--over {over}", key, OVER)
    examples = OVER[key]
    instance = f"Example: --values {','.join(examples)}"
    texts = examples if values is None else tuple(part.strip() for part in values.split(",") if part.strip())
    if not texts:
        raise UserError(f"--values {values!r} contains no value.", f"Example: --values {','.join(examples)}")
    numeric = examples[0].isdigit()
    variants = {}
    for text in texts:
        if numeric and not text.isdigit():
            raise UserError(f"--values {text} must be a whole number above 0.", instance)
        change: dict[str, Any] = {key: int(text) if numeric else text}
        if key == "activation_checkpointing":
            if text not in examples:
                raise unknown_choice(f"--values {text}", text, examples)
            change = {key: text != "none", "recompute_what": None if text == "none" else text}
        variants[f"{key} {text}"] = dataclasses.replace(options, **change)
    return variants


def _estimate_variants(
    variants: dict[str, SetupOptions], place: PlaceOptions
) -> tuple[dict[str, ConfigurationEstimate], dict[str, str]]:
    """Return the possible variants, and errors of the others. Raises the first if none is possible."""
    results = {name: _estimate_or_error(options, place) for name, options in variants.items()}
    failed = {name: result for name, result in results.items() if isinstance(result, UserError)}
    if len(failed) == len(results):
        raise next(iter(failed.values()))
    estimates = {
        name: result for name, result in results.items() if isinstance(result, ConfigurationEstimate)
    }
    return estimates, {name: error.problem for name, error in failed.items()}


def _estimate_or_error(options: SetupOptions, place: PlaceOptions) -> ConfigurationEstimate | UserError:
    try:
        return estimate_configuration(options, place)
    except UserError as error:
        return error


def chart_of(estimates: dict[str, ConfigurationEstimate], over: str | None) -> Chart:
    """Build the chart of these estimates, with the GPU's capacity if all have the same."""
    first = next(iter(estimates.values()))
    setup = first.setup
    unit = "GPU" if setup.device == "cuda" else "process"
    facts = {
        "method": calibration.method_of(setup),
        "engine": setup.engine,
        "gpus": format_count(setup.world_size, unit),
        "seq_len": f"{setup.seq_len:,} tokens",
        "micro_batch_size": f"micro batch {setup.micro_batch_size}",
        "activation_checkpointing": f"checkpointing {setup.checkpointing}",
        "precision": setup.precision,
    }
    key = over.removeprefix("--").replace("-", "_") if over else None
    subtitle = ", ".join(text for name, text in facts.items() if name != key)
    return Chart(
        title=f"{setup.model.name}: memory of one {unit}",
        subtitle=subtitle,
        bars=tuple(
            Bar(
                name=name,
                parts=result.memory.categories,
                upper_bytes=result.memory.needs_range[1],
                shows_bytes=result.memory.shows_bytes,
            )
            for name, result in estimates.items()
        ),
        capacity_bytes=first.memory.capacity_bytes,
        capacity_name=first.site.gpu.name if first.site.gpu else "",
        notes=tuple(
            dict.fromkeys(
                f"Needed: {result.memory.needs_basis}. Shown by nvidia-smi: {result.memory.shows_basis}."
                for result in estimates.values()
            )
        ),
    )


def _print(console: Console, chart: Chart, estimates: dict[str, ConfigurationEstimate]) -> None:
    from rich.table import Table

    console.print(chart.title, style="bold")
    console.print(chart.subtitle)
    console.print()
    for line in charts.stacked(chart, console):
        console.print(line)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in estimates:
        table.add_column(name, justify="right")
    if len(estimates) == 1:
        table.add_column("description", overflow="fold")
    for category in chart.categories:
        sizes = [dict(result.memory.categories).get(category, 0) for result in estimates.values()]
        cells = [format_bytes(size) if size else "-" for size in sizes]
        table.add_row(
            category, *cells, *([CATEGORY_DESCRIPTIONS.get(category, "")] if len(estimates) == 1 else [])
        )
    console.print(table)
    texts = [format_bytes(result.memory.shows_bytes) for result in estimates.values()]
    console.print(f"Shown by nvidia-smi if memory is free: {', '.join(texts)}")
    for note in chart.notes:
        console.print(note)
