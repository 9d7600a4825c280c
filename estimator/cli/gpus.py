"""finetune gpus: GPUs, instance types and prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from estimator import terminal
from estimator.cli import output
from estimator.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from estimator.hardware.catalogue import Gpu, Instance
    from estimator.hardware.cluster import Cluster


WIDEST = 1000  # characters; wider than any row


def gpus(
    min_vram: Annotated[
        float | None,
        typer.Option(help="Minimum memory in GB, as on the data sheet: 24 includes the L4 (22.35 GiB)."),
    ] = None,
    arch: Annotated[str | None, typer.Option(help="Architecture or a prefix of it: hopper, ada.")] = None,
    cloud: Annotated[str | None, typer.Option(help="Only instance types of this cloud.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU name or a prefix of it.")] = None,
    instances: Annotated[bool, typer.Option(help="Also list instance types.")] = True,
    max_price: Annotated[
        float | None,
        typer.Option(help="Maximum price in USD per hour; excludes instance types without a price."),
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Only instance types with a spot price, sorted by it.")
    ] = False,
    hardware_file: Annotated[
        Path | None,
        typer.Option("--hardware", help="CSV file with your own GPUs, instance types and prices."),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="First download current prices from AWS and gpuhunt.")
    ] = False,
    from_cluster: Annotated[
        bool, typer.Option("--from-cluster", help="List the nodes of your Kubernetes cluster instead.")
    ] = False,
    context: Annotated[
        str | None, typer.Option(help="With --from-cluster: context of the kubeconfig.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with units in its keys.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table that --hardware reads.")] = False,
) -> None:
    """List GPUs and the instance types with them, their prices and the age of the prices.

    The table shows the memory that the driver reports, which plans use. Unknown values are "?", and null in
    JSON.
    """
    from estimator import hardware
    from estimator.hardware import report

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other.", "Choose one of them.")
    if context is not None and not from_cluster:
        raise UserError("--context needs --from-cluster.", "Add --from-cluster, or remove --context.")
    filters = report.Filters(
        min_vram=min_vram, architecture=arch, cloud=cloud, gpu=gpu, max_usd_per_hour=max_price, spot=spot
    )
    if refresh:
        report.choose(hardware.catalogue(hardware_file), filters)  # errors before the download
    refreshed = _refresh(hardware_file) if refresh else ()
    catalogue, cluster = hardware.catalogue(hardware_file), None
    for line in (*refreshed, *catalogue.warnings):
        output.note(line)
    if from_cluster:
        from estimator.hardware.cluster.inventory import read_cluster

        cluster = read_cluster(context, catalogue=catalogue)
        catalogue = cluster.catalogue(catalogue)
    cards, machines = report.choose(catalogue, filters)
    if cluster is not None:
        machine_gpus = {item.gpu for item in machines}
        cards = tuple(card for card in cards if card.name in machine_gpus)
    if not instances:
        machines = ()
    if as_json:
        _print_json(cards, machines, cluster, refreshed)
    elif as_csv:
        terminal.write_data(report.as_csv(cards, machines))
    else:
        _print_tables(cards, machines, cluster)


def _refresh(hardware_file: Path | None) -> tuple[str, ...]:
    from estimator import hardware
    from estimator.hardware.prices.refresh import refresh

    return refresh(hardware.catalogue(hardware_file))


def _print_json(
    cards: tuple[Gpu, ...],
    machines: tuple[Instance, ...],
    cluster: Cluster | None,
    refreshed: tuple[str, ...],
) -> None:
    import json
    from datetime import date

    from estimator.hardware.report import cluster_record, gpu_record, instance_record

    record = {
        "gpus": [gpu_record(card) for card in cards],
        "instances": [instance_record(item, date.today()) for item in machines],
        "cluster": None if cluster is None else cluster_record(cluster),
        "refreshed": list(refreshed),
    }
    typer.echo(json.dumps(record, indent=1))


def _print_tables(cards: tuple[Gpu, ...], machines: tuple[Instance, ...], cluster: Cluster | None) -> None:
    from datetime import date

    from estimator.hardware.view import cluster_table, gpu_table, instance_table, price_sources

    console = terminal.console(soft_wrap=True)
    if cluster is not None:
        console.print(
            f"Cluster of context {cluster.context}; nodes without a GPU: {cluster.nodes_without_gpu}"
        )
        for skipped in cluster.skipped:
            console.print(f"Skipped, {skipped.reason}: {', '.join(skipped.names)}", markup=False)
        _print_whole(console, cluster_table(cluster))
    if not cards:
        console.print("No GPU matches these options.")
        return
    _print_whole(console, gpu_table(cards))
    if machines:
        _print_whole(console, instance_table(machines, date.today()))
        sources = price_sources(machines)
        if sources:
            console.print("age: days since the price was read. Sources of the prices:")
        for number, source in enumerate(sources, 1):
            console.print(f"{number}  {source}", markup=False, highlight=False)


def _print_whole(console: Console, table: Table) -> None:
    """Print at full width: lines may wrap, but figures are never truncated."""
    from rich.measure import Measurement

    normal = console.width
    console.width = WIDEST
    console.width = max(normal, Measurement.get(console, console.options, table).maximum)
    console.print(table)
    console.width = normal
