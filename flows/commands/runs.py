"""finetune runs: runs of the flow next to each other, in the terminal or as a page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from estimator.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from decorators.card.runs import RunRecord

FLOW = "FinetuneFlow"
DEFAULT_RUNS = 4
BASE = "base"  # name for the model before training in the list of runs


def runs(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Ids of runs, or their last digits [default: the newest]"),
    ] = None,
    flow: Annotated[
        str, typer.Option(help="Name of the flow: FinetuneFlow, RejectionFlow or LinearFinetuneFlow.")
    ] = FLOW,
    last: Annotated[int, typer.Option(min=1, help="Number of newest runs, if none is named.")] = DEFAULT_RUNS,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page with curves and all values to this file.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Show answers to the prompts in this file (text or JSON Lines). A single run is compared "
            "with its base model; for several runs add the word base."
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION|FOLDER",
            help="Score each answer by function(prompt, answer), or by the reward model in a folder.",
        ),
    ] = None,
    blind: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.json",
            help="Shuffle the answers of each prompt, and write to this file which run gave which.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run.")] = False,
) -> None:
    """Compare runs of the flow: settings that differ, loss, predicted and measured values, price.

    Reads the runs from Metaflow's configured datastore, or from the folder where they were started.
    """
    from estimator.cli.output import console, note, print_json, write_text
    from flows.commands.past_runs import read_runs

    if prompts is None and (score is not None or blind is not None):
        raise UserError("--score and --blind need answers.", "Give --prompts FILE too.")
    run_names = [run for run in chosen or () if run != BASE]
    records = read_runs(flow, run_names, 1 if prompts is not None and not run_names else last)
    comparison = None
    if prompts is not None:
        from flows.commands import answers as finetune_answers

        shown = [record.run for record in records] + [BASE] * (BASE in (chosen or ()))
        comparison = finetune_answers.compare_runs(
            flow, shown, prompts=prompts, score=score, key=blind, max_new_tokens=max_new_tokens
        )
    if html is not None:
        from decorators._metaflow import standalone_page
        from decorators.card.runs import draw_runs
        from decorators.card.writer import components

        blocks = draw_runs(flow, records)
        if comparison is not None:
            blocks += finetune_answers.page_blocks(comparison)
        write_text(html, standalone_page(f"Runs of {flow}", components(blocks)))
        note(f"written: {html}")
    if as_json:
        rows = [record.to_dict() for record in records]
        print_json(rows if comparison is None else {"runs": rows, "answers": asdict(comparison)})
    elif html is None:
        terminal = console()
        terminal.print(_figures(records))
        settings = _settings(records)
        if settings is not None:
            terminal.print(settings)
        if comparison is not None:
            terminal.print(finetune_answers.terminal_table(comparison))


def _figures(records: list[RunRecord]) -> Table:
    """Return the table of figures, with one column per run."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from decorators.card.runs import figures, short_names

    table = Table(box=SIMPLE_HEAD)
    table.add_column("run", style="bold")
    for name in short_names([record.run for record in records]):
        table.add_column(name, justify="right", overflow="fold")
    table.add_row("id", *(record.run for record in records))
    for name, cells in figures(records):
        table.add_row(name, *cells)
    return table


def _settings(records: list[RunRecord]) -> Table | None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from decorators.card.runs import differing_settings, short_names

    rows = differing_settings(records)
    if not rows:
        return None
    table = Table(box=SIMPLE_HEAD, title="settings that differ", title_justify="left")
    table.add_column("setting", style="bold")
    for name in short_names([record.run for record in records]):
        table.add_column(name, justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *cells)
    return table
