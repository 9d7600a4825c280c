"""finetune estimate: memory, speed and price of one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from estimator import calibration, hardware, memory
from estimator.cli import output, unused
from estimator.cli.answer import ConfigurationEstimate, catalogue, estimate_configuration
from estimator.cli.common import option
from estimator.cli.help import GROUPS
from estimator.cli.options import PlaceOptions, SetupOptions, expanded
from estimator.cli.steps import engine_of
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_count, format_duration, format_parameters, format_usd
from estimator.models.diffusion import DiffusionSpec
from estimator.planning.report import describe_batch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from estimator.exact import ExactEstimate

BAR = 28  # columns of the longest bar


@expanded
def estimate(
    options: SetupOptions,
    place: PlaceOptions,
    exact: Annotated[bool, option(GROUPS[-1], "Also trace the real model (needs torch).", "--exact")] = False,
    breakdown: Annotated[
        bool, option(GROUPS[-1], "Explain the memory by category, as bars.", "--breakdown")
    ] = False,
    over: Annotated[
        str | None, option(GROUPS[-1], "Draw one bar per value of this option, such as tp.")
    ] = None,
    values: Annotated[str | None, option(GROUPS[-1], "Values of --over, separated by commas.")] = None,
    svg: Annotated[Path | None, option(GROUPS[-1], "Write the breakdown to this SVG file.", "--svg")] = None,
    html: Annotated[
        Path | None, option(GROUPS[-1], "Write the breakdown to this HTML file.", "--html")
    ] = None,
    as_json: Annotated[bool, option(GROUPS[-1], "Print one JSON object.", "--json")] = False,
    as_csv: Annotated[bool, option(GROUPS[-1], "Print one row of CSV.", "--csv")] = False,
) -> None:
    """Estimate memory, speed and price of one configuration."""
    output.one_format(json=as_json, csv=as_csv)
    with catalogue(place.hardware):
        if breakdown or any(value is not None for value in (over, values, svg, html)):
            from estimator.cli.breakdown import show_breakdown

            show_breakdown(
                options, place, over=over, values=values, svg=svg, html=html, as_json=as_json, as_csv=as_csv
            )
            return
        result = estimate_configuration(options, place)
        unused.check_estimate(options, place, result.setup)
        for problem in result.site.problems:
            output.note(problem)
        if result.usd_per_hour is not None and result.site.instance is not None:
            old = hardware.old_prices([result.site.instance.name])
            if old:
                output.note(old)
        traced = _trace(result) if exact else None
        if as_json:
            record = result.to_dict()
            output.print_json(record | {"exact": _exact_dict(traced)} if traced else record)
        elif as_csv:
            extra = {"exact_bytes": traced.peak_bytes} if traced else {}
            output.print_csv([result.to_row() | extra])
        else:
            _print(result, options, traced)


def _trace(result: ConfigurationEstimate) -> ExactEstimate:
    from estimator import exact

    if isinstance(result.setup.model, DiffusionSpec):
        raise UserError(
            f"Exact mode cannot trace {result.setup.model.name}: it supports language models only.",
            "Remove --exact: the formulas count the tensors of a UNet exactly.",
        )
    return exact.estimate(result.setup)


def _exact_dict(traced: ExactEstimate) -> dict[str, Any]:
    return {
        "categories": traced.categories,
        "peak_bytes": traced.peak_bytes,
        "peak_at": traced.peak.name,
        "from_formula": traced.from_formula,
        "unmodeled": traced.unmodeled,
        "seconds": traced.seconds,
        "versions": dict(traced.versions),
    }


# ---------------------------------------------------------------------------------------------------------
# For people


def _print(result: ConfigurationEstimate, options: SetupOptions, traced: ExactEstimate | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = output.console()
    setup = result.setup
    title = Text.assemble(
        (setup.model.name, "bold"),
        f", {calibration.method_of(setup)} with {setup.engine}: "
        f"{format_parameters(setup.model.parameters)}, {_trained(result)}",
    )
    console.print(title)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(min_width=10)
    facts.add_column(overflow="fold")
    facts.add_row("Layout", _layout(result))
    facts.add_row("Step", _step(result))
    defaults = _by_default(result, options)
    if defaults:
        facts.add_row("Defaults", f"{', '.join(defaults)} ({engine_of(setup.engine)[1].source})")
    console.print(facts)
    console.print()
    _print_memory(console, result, traced)
    console.print()
    console.print(_requirements(result))


def _trained(result: ConfigurationEstimate) -> str:
    trained = result.setup.trainable_parameters
    if not result.setup.adapters:
        return "all trained"
    return f"{trained / 1e6:,.1f} M trained ({trained / result.setup.model.parameters:.2%})"


def _layout(result: ConfigurationEstimate) -> str:
    setup, gpu = result.setup, result.site.gpu
    hardware_name = gpu.name if gpu else ("CPU" if setup.device == "cpu" else "GPU")
    node = f"{setup.processes_per_node}x {hardware_name}"
    parts = [f"{format_count(setup.world_size, 'process')}, {format_count(setup.nodes, 'node')} of {node}"]
    degrees = {
        setup.sharding: setup.shard if setup.shard > 1 else 0,
        "replicas": setup.replicate,
        "tensor parallel": setup.tensor,
        "context parallel": setup.context,
        "pipeline": setup.pipeline,
        "expert parallel": setup.expert,
    }
    parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if setup.pipeline > 1:
        parts.append(f"schedule {setup.schedule}")
    return ", ".join(parts)


def _step(result: ConfigurationEstimate) -> str:
    setup = result.setup
    length = setup.model.describe_length(setup.seq_len) + ("" if setup.fixed_length else " at most")
    parts = [
        f"{describe_batch(setup)} of {length}",
        setup.precision + ("" if setup.fp8 == "none" else f" with fp8 {setup.fp8}"),
        setup.optimizer + (" in the backward pass" if setup.optimizer_in_backward else ""),
        f"checkpointing {setup.checkpointing}",
    ]
    if setup.prompts:
        prompts = setup.llama_adapter
        parts.append(f"prompts of {prompts.prompt_length} from block {prompts.start_layer}")
    elif setup.adapters:
        parts.append(f"rank {setup.lora_rank} on {', '.join(setup.lora_targets)}")
    if isinstance(setup.model, DiffusionSpec):
        if setup.model.loads_encoders:
            parts.append("with VAE and text encoders")
        if setup.model.keeps_average:
            parts.append("with a moving average of the weights")
    if setup.quantization != "none":
        parts.append(f"base in {setup.quantization}")
    if setup.offload != "none":
        parts.append(f"{setup.offload} offloaded to {setup.offload_to}")
    if setup.compile:
        parts.append("compiled")
    text = ", ".join(parts)
    longest = setup.model.max_seq_len
    return text + (
        f"; longer than the {longest:,} tokens that {setup.model.name} supports"
        if setup.seq_len > longest
        else ""
    )


def _by_default(result: ConfigurationEstimate, options: SetupOptions) -> list[str]:
    """List the values that were set by defaults of the engine."""
    setup = result.setup
    open_values = {
        f"precision {setup.precision}": options.precision is None,
        f"sharding {setup.sharding}": options.sharding is None and setup.world_size > 1,
        f"checkpointing {setup.checkpointing}": options.activation_checkpointing is None,
        f"loss {setup.loss}": options.loss is None,
        "compiled": setup.compile and options.compile is None,
        "Liger-Kernel": setup.runs_loop and setup.loss == "fused" and options.loss is None,
        "samples packed" if setup.fixed_length else "samples of varying length": options.packing is None,
    }
    return [name for name, is_open in open_values.items() if is_open]


def _print_memory(console: Console, result: ConfigurationEstimate, traced: ExactEstimate | None) -> None:
    from rich.table import Table

    from estimator.charts import bar_of

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", show_header=traced is not None)
    table.add_column("category")
    table.add_column("formula", justify="right")
    if traced is not None:
        table.add_column("exact", justify="right")
    table.add_column("")
    parts = dict(result.memory.categories)
    traced_parts = dict(traced.categories) if traced else {}
    largest = max([*parts.values(), *traced_parts.values()])
    for name in dict.fromkeys([*parts, *(name for name, size in traced_parts.items() if size)]):
        cells = [name, format_bytes(parts.get(name, 0))]
        if traced is not None:
            cells.append(format_bytes(traced_parts[name]) if name in traced_parts else "-")
        table.add_row(*cells, bar_of(name, parts.get(name, 0), largest, BAR))
    unit = "GPU" if result.setup.device == "cuda" else "process"
    console.print(f"Memory of one {unit}", style="bold")
    console.print(table)
    _print_verdict(console, result)
    if traced is not None:
        versions = ", ".join(f"{name} {version}" for name, version in traced.versions)
        console.print(
            f"exact: {format_bytes(traced.peak_bytes)} of live tensors at {traced.peak.name}, by formula "
            f"{format_bytes(sum(memory.active(result.setup).values()))}; "
            f"traced in {traced.seconds:.0f} s ({versions})"
        )
        for clause in traced.unmodeled:
            console.print(f"exact excludes: {clause}")


def _with_range(size: int, limits: tuple[int, int]) -> str:
    return f"{format_bytes(size)} ({format_bytes(limits[0])} to {format_bytes(limits[1])})"


def _print_verdict(console: Console, result: ConfigurationEstimate) -> None:
    from rich.text import Text

    peak, gpu = result.memory, result.site.gpu
    place = f" ({gpu.name})" if gpu else ""
    colors = {"fits": "green", "tight": "yellow", "does not fit": "red"}
    color = colors[peak.verdict] if peak.verdict else "default"
    console.print(Text.assemble(("Memory", "bold"), " ", (peak.describe(), color), place))
    console.print(f"Needs {_with_range(peak.needs_bytes, peak.needs_range)}")
    console.print(f"Range: {peak.needs_basis}")
    counter = "nvidia-smi" if result.setup.device == "cuda" else "the system"
    console.print(
        f"Expect {counter} to show {_with_range(peak.shows_bytes, peak.shows_range)} if memory is free"
    )
    console.print(f"Range: {peak.shows_basis}")


def _requirements(result: ConfigurationEstimate) -> Table:
    """Build the lines below the memory: node, speed, price and calibration."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=10)
    table.add_column(overflow="fold")
    table.add_row(
        "Node",
        f"{format_bytes(result.memory.host_bytes)} host memory, "
        f"{format_bytes(result.shared_memory_bytes)} /dev/shm, "
        f"{format_bytes(result.disk_bytes)} disk",
    )
    table.add_row("Speed", _speed(result))
    table.add_row("Price", _price(result))
    if result.correction is not None:
        name = calibration.method_of(result.setup)
        table.add_row(
            "Calibration",
            f"{result.correction.basis} with {result.setup.engine} {name} on {result.correction.gpu}; "
            "--no-calibration ignores them",
        )
    return table


def _speed(result: ConfigurationEstimate) -> str:
    speed, count = result.speed, result.setup.world_size
    if speed.tokens_per_second is None:
        return f"unknown: {speed.basis}"
    text = f"{speed.tokens_per_second:,.0f} tokens/s"
    if count > 1:
        text += f", {speed.tokens_per_second / count:,.0f} per GPU"
    if speed.tokens_per_second_range is not None:
        low, high = speed.tokens_per_second_range
        text += f" ({low:,.0f} to {high:,.0f})"
    if speed.mfu is not None:
        text += f", MFU {speed.mfu:.0%}"
    return f"{text}; {speed.basis}"


def _price(result: ConfigurationEstimate) -> str:
    tokens, takes = result.site.tokens, format_duration((result.hours or 0) * 3600)
    time = f"{takes} for {tokens:,.0f} tokens" if result.hours and tokens else ""
    if result.usd_per_hour is None:
        return "; ".join(part for part in (time, f"price unknown: {result.price_basis}") if part)
    text = f"{format_usd(result.usd_per_hour)} per hour: {result.price_basis}"
    if result.usd is not None:
        text = f"{format_usd(result.usd)} for {tokens:,.0f} tokens in {takes}; {text}"
    return text
