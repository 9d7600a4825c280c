"""finetune estimate: memory, speed and price of one configuration that the user has in mind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from estimator import calibration, memory, models
from estimator.cli import diffusion_answer, output
from estimator.cli.answer import Answer, answer, catalogue
from estimator.cli.defaults import defaults
from estimator.cli.options import PlaceOptions, SetupOptions, expanded
from estimator.errors import UserError
from estimator.models.diffusion import DiffusionSpec
from estimator.plan import gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from estimator.exact import ExactEstimate

BAR = 28  # columns of the longest bar


@expanded
def estimate(
    wanted: SetupOptions,
    where: PlaceOptions,
    image_size: Annotated[
        int, Option(help="Pixels of an image's side, for diffusion models.", rich_help_panel="Batch")
    ] = 1024,
    exact: Annotated[
        bool,
        Option("--exact", help="Trace the real model too (needs torch).", rich_help_panel="Answer"),
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object.", rich_help_panel="Answer")
    ] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print one row of CSV.", rich_help_panel="Answer")] = False,
) -> None:
    """Memory, speed and price of one configuration."""
    output.one_format(json=as_json, csv=as_csv)
    with catalogue(where.hardware):
        found = _diffusion_model(wanted.model)
        if found is not None:
            diffusion_answer.show(
                found, wanted, where, image_size, as_json=as_json, as_csv=as_csv, exact=exact
            )
            return
        made = answer(wanted, where)
        for problem in made.site.problems:
            output.note(problem)
        traced = _traced(made) if exact else None
        if as_json:
            values = made.to_dict()
            output.print_json(values | {"exact": _exact_dict(traced)} if traced else values)
        elif as_csv:
            extra = {"exact_bytes": traced.peak_bytes} if traced else {}
            output.print_csv([made.to_row() | extra])
        else:
            _print(made, wanted, traced)


def _diffusion_model(name: str) -> DiffusionSpec | None:
    try:
        found = models.find_any(name)
    except UserError:
        return None  # a directory or an id: models.resolve knows, or says what is wrong
    return found if isinstance(found, DiffusionSpec) else None


def _traced(made: Answer) -> ExactEstimate:
    from estimator import exact

    return exact.estimate(made.setup)


def _exact_dict(traced: ExactEstimate) -> dict[str, Any]:
    return {
        "categories": traced.categories,
        "peak_bytes": traced.peak_bytes,
        "peak_at": traced.peak.name,
        "from_formula": traced.from_formula,
        "not_modelled": traced.not_modelled,
        "seconds": traced.seconds,
        "versions": dict(traced.versions),
    }


# ---------------------------------------------------------------------------------------------------------
# For people


def _print(made: Answer, wanted: SetupOptions, traced: ExactEstimate | None) -> None:
    from rich.table import Table

    console = output.console()
    setup = made.setup
    console.print(
        f"[bold]{setup.model.name}[/bold], {wanted.method} with {setup.engine}: "
        f"{setup.model.parameters / 1e9:.2f} B parameters, {_trained(made)}"
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(min_width=10)
    facts.add_column(overflow="fold")
    facts.add_row("Layout", _layout(made))
    facts.add_row("Step", _step(made))
    by_default = _by_default(made, wanted)
    if by_default:
        facts.add_row("By default", f"{', '.join(by_default)} ({defaults(setup.engine).source})")
    console.print(facts)
    console.print()
    _print_memory(console, made, traced)
    console.print()
    console.print(_rest(made))


def _trained(made: Answer) -> str:
    trained = made.setup.trainable_parameters
    if not made.setup.adapters:
        return "all trained"
    return f"{trained / 1e6:,.1f} M trained ({trained / made.setup.model.parameters:.2%})"


def _layout(made: Answer) -> str:
    setup, gpu = made.setup, made.site.gpu
    what = gpu.name if gpu else ("CPU" if setup.device == "cpu" else "GPU")
    parts = [f"{setup.world_size} process(es), {setup.nodes} node(s) of {setup.processes_per_node}x {what}"]
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


def _step(made: Answer) -> str:
    setup = made.setup
    batch = setup.micro_batch_size * setup.accumulation * setup.data_parallel
    parts = [
        f"batch {batch} = {setup.micro_batch_size} x {setup.accumulation} x {setup.data_parallel}",
        f"{setup.seq_len:,} tokens" + ("" if setup.fixed_length else " at most"),
        setup.precision + ("" if setup.fp8 == "none" else f" with fp8 {setup.fp8}"),
        setup.optimizer + (" in the backward pass" if setup.optimizer_in_backward else ""),
        f"checkpointing {setup.checkpointing}",
    ]
    if setup.adapters:
        parts.append(f"rank {setup.lora_rank} on {', '.join(setup.lora_targets)}")
    if setup.quantization != "none":
        parts.append(f"base in {setup.quantization}")
    if setup.offload != "none":
        parts.append(f"{setup.offload} offloaded to {setup.offload_to}")
    if setup.compile:
        parts.append("compiled")
    text = ", ".join(parts)
    longest = setup.model.max_seq_len
    return text + (
        f"; longer than the {longest:,} tokens that {setup.model.name} was made for"
        if setup.seq_len > longest
        else ""
    )


def _by_default(made: Answer, wanted: SetupOptions) -> list[str]:
    """What the user left open and the engine's defaults decided."""
    setup = made.setup
    open_values = {
        f"precision {setup.precision}": wanted.precision is None,
        f"sharding {setup.sharding}": wanted.sharding is None and setup.world_size > 1,
        f"checkpointing {setup.checkpointing}": wanted.checkpointing is None,
        f"loss {setup.loss}": wanted.loss is None,
        "samples packed" if setup.fixed_length else "samples of varying length": wanted.packed is None,
    }
    return [name for name, is_open in open_values.items() if is_open]


def _print_memory(console: Console, made: Answer, traced: ExactEstimate | None) -> None:
    from rich.table import Table

    from estimator.charts import bar_of

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", show_header=traced is not None)
    table.add_column("category")
    table.add_column("formula", justify="right")
    if traced is not None:
        table.add_column("exact", justify="right")
    table.add_column("")
    parts = dict(made.memory.categories)
    shown = dict(traced.categories) if traced else {}
    largest = max([*parts.values(), *shown.values()])
    for name in dict.fromkeys([*parts, *(name for name, size in shown.items() if size)]):
        cells = [name, gib(parts.get(name, 0))]
        if traced is not None:
            cells.append(gib(shown[name]) if name in shown else "-")
        table.add_row(*cells, bar_of(name, parts.get(name, 0), largest, BAR))
    what = "GPU" if made.setup.device == "cuda" else "process"
    console.print(f"Memory of one {what}", style="bold")
    console.print(table)
    _print_verdict(console, made)
    if traced is not None:
        exact = ", ".join(f"{name} {version}" for name, version in traced.versions)
        console.print(
            f"exact: {gib(traced.peak_bytes)} of live tensors at {traced.peak.name}, and by formula "
            f"{gib(sum(memory.active(made.setup).values()))}; traced in {traced.seconds:.0f} s ({exact})"
        )
        for clause in traced.not_modelled:
            console.print(f"exact leaves out: {clause}")


def _print_verdict(console: Console, made: Answer) -> None:
    found, gpu = made.memory, made.site.gpu
    text = f"{gib(found.likely_bytes)} likely, up to {gib(found.upper_bytes)}"
    if found.capacity_bytes is not None:
        text += f", of the {gpu.name if gpu else 'process'}'s {gib(found.capacity_bytes)}"
    verdict = {True: ": [green]fits[/green]", False: ": [red]DOES NOT FIT[/red]", None: ""}[found.fits]
    console.print(f"[bold]{text}[/bold]{verdict}")
    console.print(f"range {found.basis}")


def _rest(made: Answer) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=10)
    table.add_column(overflow="fold")
    table.add_row(
        "Node",
        f"{gib(made.memory.host_bytes)} host memory, {gib(made.shared_memory_bytes)} /dev/shm, "
        f"{gib(made.disk_bytes)} disk",
    )
    table.add_row("Speed", _speed(made))
    table.add_row("Price", _price(made))
    if made.correction is not None:
        name = calibration.method_of(made.setup)
        table.add_row(
            "Calibration",
            f"{made.correction.basis} with {made.setup.engine} {name} on {made.correction.gpu}; "
            "--no-calibration leaves them out",
        )
    return table


def _speed(made: Answer) -> str:
    speed, count = made.speed, made.setup.world_size
    if speed.tokens_per_second is None:
        return f"unknown: {speed.basis}"
    text = f"{speed.tokens_per_second:,.0f} tokens/s"
    if count > 1:
        text += f", {speed.tokens_per_second / count:,.0f} of each GPU"
    if speed.tokens_per_second_range is not None:
        low, high = speed.tokens_per_second_range
        text += f" ({low:,.0f} to {high:,.0f})"
    if speed.mfu is not None:
        text += f", MFU {speed.mfu:.0%}"
    return f"{text}; {speed.basis}"


def _price(made: Answer) -> str:
    tokens = made.site.tokens
    time = f"{output.hours(made.hours)} for {tokens:,.0f} tokens" if made.hours and tokens else ""
    if made.usd_per_hour is None:
        return "; ".join(part for part in (time, f"price unknown: {made.price_basis}") if part)
    text = f"{output.usd(made.usd_per_hour)} an hour: {made.price_basis}"
    if made.usd is not None:
        text = f"{output.usd(made.usd)} for {tokens:,.0f} tokens in {output.hours(made.hours or 0)}; {text}"
    return text
