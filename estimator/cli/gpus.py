"""finetune gpus: which GPUs there are, on which machines, at what price."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from estimator.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from estimator.hardware.catalogue import Gpu, Instance
    from estimator.hardware.cluster import Cluster


WIDEST = 1000  # characters; more than any row has


def gpus(
    min_vram: Annotated[
        float | None,
        typer.Option(
            help="Cards of that size or more, by the GB they are sold as: 24 finds an L4 (22.35 GiB)."
        ),
    ] = None,
    arch: Annotated[str | None, typer.Option(help="Architecture, or its beginning: hopper, ada.")] = None,
    cloud: Annotated[str | None, typer.Option(help="Machines of this cloud only.")] = None,
    gpu: Annotated[str | None, typer.Option(help="This GPU, or all whose name begins so.")] = None,
    instances: Annotated[bool, typer.Option(help="The machines that have them, too.")] = True,
    max_price: Annotated[
        float | None, typer.Option(help="Machines up to so many USD an hour; unpriced ones are left out.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines with a spot price, by that price.")] = False,
    hardware_file: Annotated[
        Path | None, typer.Option("--hardware", help="A CSV of your own GPUs, machines and prices.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="First ask AWS and gpuhunt for today's prices.")
    ] = False,
    from_cluster: Annotated[
        bool,
        typer.Option("--from-cluster", help="The nodes of your Kubernetes cluster instead of the clouds'."),
    ] = False,
    context: Annotated[
        str | None, typer.Option(help="With --from-cluster: the kubeconfig's context.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, units in its names.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table that --hardware reads.")] = False,
) -> None:
    """Show GPUs and the machines that have them, with prices and their age.

    --min-vram goes by the GB that a card is sold as: 24 finds L4, A10G and
    RTX 4090, though clouds report 22.35 GiB of an L4. Plans are made with
    what is reported, which is what the table shows. A figure that no one
    has sourced is "?" here and null in JSON.
    """
    from estimator import hardware
    from estimator.hardware import report

    if as_json and as_csv:
        raise UserError("--json and --csv can't go together.", "Choose one of them.")
    if context is not None and not from_cluster:
        raise UserError("--context goes with --from-cluster.", "Add --from-cluster, or leave --context out.")
    wish = report.Wish(
        min_vram=min_vram, architecture=arch, cloud=cloud, gpu=gpu, max_usd_per_hour=max_price, spot=spot
    )
    refreshed = _refresh(hardware_file) if refresh else ()
    catalogue, cluster = hardware.catalogue(hardware_file), None
    for line in (*refreshed, *catalogue.warnings):
        typer.echo(line, err=True)
    if from_cluster:
        from estimator.hardware.cluster.inventory import read_cluster

        cluster = read_cluster(context, catalogue=catalogue)
        catalogue = cluster.catalogue(catalogue)
    cards, machines = report.choose(catalogue, wish)
    if cluster is not None:
        there = {item.gpu for item in machines}
        cards = tuple(card for card in cards if card.name in there)
    if not instances:
        machines = ()
    if as_json:
        _print_json(cards, machines, cluster, refreshed)
    elif as_csv:
        typer.echo(report.as_csv(cards, machines), nl=False)
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

    from rich.console import Console

    from estimator.hardware.view import cluster_table, gpu_table, instance_table, price_sources

    console = Console(soft_wrap=True)
    if cluster is not None:
        console.print(f"Cluster of context {cluster.context}; nodes without a GPU: {cluster.without_gpu}")
        for aside in cluster.aside:
            console.print(f"Left aside, {aside.reason}: {', '.join(aside.names)}", markup=False)
        _print_whole(console, cluster_table(cluster))
    if not cards:
        console.print("No GPU goes with these options.")
        return
    _print_whole(console, gpu_table(cards))
    if machines:
        _print_whole(console, instance_table(machines, date.today()))
        console.print("age: of the price. Sources of the prices:")
        for number, source in enumerate(price_sources(machines), 1):
            console.print(f"{number}  {source}", markup=False, highlight=False)


def _print_whole(console: Console, table: Table) -> None:
    """In its full width: a cut figure could be taken for another one, a broken line can't."""
    from rich.measure import Measurement

    normal = console.width
    console.width = WIDEST
    console.width = max(normal, Measurement.get(console, console.options, table).maximum)
    console.print(table)
    console.width = normal
