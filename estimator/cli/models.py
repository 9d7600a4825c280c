"""finetune models: models known by name, and the shape of any other model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from estimator import terminal
from estimator.cli import output
from estimator.errors import UserError
from estimator.models import FAMILIES, aliases, find, names, resolve
from estimator.models.diffusion import STABLE_DIFFUSION_XL, DiffusionSpec
from estimator.models.spec import ModelSpec
from estimator.names import similar_names

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 140  # columns of a terminal that shows complete rows
_SIZES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """Row of ``finetune models``; None: the field does not apply to the model."""

    name: str
    aliases: tuple[str, ...]
    hf_id: str | None
    family: str
    parameters: int
    active_parameters: int
    published_parameters: int | None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    max_seq_len: int | None = None
    license: str | None = None
    license_source: str | None = None
    gated: bool = False
    source: str

    def values(self) -> dict[str, Any]:
        """Return the fields by name, in display order."""
        return {name: getattr(self, name) for name in self.__slots__}


def models(
    search: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Part of a name, alias or id; or any Hugging Face id or folder."
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Model family, as model_type in config.json: llama, qwen3_moe.")
    ] = None,
    min_params: Annotated[str | None, typer.Option(help="Minimum number of parameters: 7B, 500M.")] = None,
    max_params: Annotated[str | None, typer.Option(help="Maximum number of parameters.")] = None,
    moe: Annotated[
        bool | None, typer.Option("--moe/--dense", help="Only mixture-of-experts models, or only dense ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """List the models known by name, or show the shape of one (by name, id or folder)."""
    matching = _matching(search, family)
    smallest, largest = _parse_count(min_params, "--min-params"), _parse_count(max_params, "--max-params")
    rows = [
        row
        for row in matching
        if (smallest is None or row.parameters >= smallest)
        and (largest is None or row.parameters <= largest)
        and (moe is None or bool(row.experts) == moe)
    ]
    if not rows:
        raise UserError("No model of the table matches.", "Use fewer filters: `finetune models` lists all.")
    if as_json:
        _print_json(rows)
    elif as_csv:
        _print_csv(rows)
    else:
        _print_tables(rows)


def _matching(search: str | None, family: str | None) -> list[ModelRow]:
    rows = [_row(name) for name in (*names(), STABLE_DIFFUSION_XL.name)]
    families = dict.fromkeys([*FAMILIES, *(row.family for row in rows)])
    if family is not None and family not in families:
        families_by_name = (
            row.family for row in rows if any(family.lower() in name for name in _spellings(row))
        )
        suggestions = similar_names(family, families) or list(dict.fromkeys(families_by_name))
        choices = (
            f"Did you mean {', '.join(suggestions)}?"
            if suggestions
            else f"Choose one of {', '.join(families)}."
        )
        raise UserError(f"--family {family} is not known.", choices)
    rows = [row for row in rows if family in (None, row.family)]
    if search is None:
        return rows
    text = search.strip().lower().replace("_", "-")
    exact = [row for row in rows if text in _spellings(row)]
    parts = exact or [row for row in rows if any(text in name for name in _spellings(row))]
    return parts or [_language_row(resolve(search).spec, ())]


def _spellings(row: ModelRow) -> list[str]:
    return [name.lower() for name in (row.name, *row.aliases, row.hf_id or "") if name]


def _row(name: str) -> ModelRow:
    model = find(name)
    if isinstance(model, DiffusionSpec):
        return _diffusion_row(model)
    return _language_row(model, tuple(aliases(name)))


def _language_row(model: ModelSpec, names: tuple[str, ...]) -> ModelRow:
    return ModelRow(
        name=model.name,
        aliases=tuple(name for name in names if name != model.hf_id),
        hf_id=model.hf_id,
        family=model.family,
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        published_parameters=model.published_parameters,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn,
        vocab=model.vocab,
        experts=model.experts,
        experts_per_token=model.experts_per_token,
        max_seq_len=model.max_seq_len,
        license=model.license or None,
        license_source=model.license_source or None,
        gated=model.gated,
        source=model.source,
    )


def _diffusion_row(model: DiffusionSpec) -> ModelRow:
    return ModelRow(
        name=model.name,
        aliases=("sdxl",) if model.hf_id else (),
        hf_id=model.hf_id,
        family="diffusion",
        parameters=model.stored_parameters,
        active_parameters=model.stored_parameters,
        published_parameters=model.stored_parameters,
        source=model.source,
    )


def _parse_count(text: str | None, option: str) -> float | None:
    """Parse a number of parameters, such as 7B."""
    if text is None:
        return None
    cleaned = text.strip().lower().replace(",", "").replace("_", "")
    unit = _SIZES.get(cleaned[-1:], 1.0)
    try:
        value = float(cleaned[:-1] if cleaned[-1:] in _SIZES else cleaned) * unit
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UserError(f"{option} {text} is not a number of parameters.", "Write 7B, 500M or 7e9.")
    return value


# ---------------------------------------------------------------------------------------------------------
# Printing


def _print_json(rows: Iterable[ModelRow]) -> None:
    import json

    typer.echo(json.dumps([row.values() for row in rows], indent=1))


def _print_csv(rows: list[ModelRow]) -> None:
    output.print_csv([row.values() | {"aliases": " ".join(row.aliases)} for row in rows])


def _print_tables(rows: list[ModelRow]) -> None:
    console = terminal.console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = terminal.console(width=WIDE)  # a pipe has no width
    if len(rows) == 1:
        console.print(_details(rows[0]))
        return
    console.print(_table(rows, wide=console.width >= WIDE))
    console.print("For all aliases and the source of a row, name one model or use --csv or --json.")


def _details(row: ModelRow) -> Table:
    from rich.table import Table

    table = Table(title=row.name, show_header=False)
    table.add_column("field")
    table.add_column("value", overflow="fold")
    for name, value in row.values().items():
        if value not in (None, (), False) and name != "name":
            text = "yes" if value is True else f"{value:,}" if isinstance(value, int) else value
            table.add_row(name.replace("_", " "), ", ".join(text) if isinstance(text, tuple) else text)
    return table


def _table(rows: list[ModelRow], *, wide: bool) -> Table:
    from rich.table import Table

    table = Table(title=f"{len(rows)} models")
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    for name in ("parameters", "active", "experts", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("layers", "hidden", "heads/kv"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("also", overflow="fold")
    for row in rows:
        short = ", ".join(name for name in row.aliases if "/" not in name)
        heads = "" if row.heads is None else f"{row.heads}/{row.kv_heads}"
        experts = f"{row.experts_per_token} of {row.experts}" if row.experts else ""
        active = _short(row.active_parameters) if row.experts else ""
        cells = [row.name, row.family, _short(row.parameters), active, experts, _tokens(row.max_seq_len)]
        cells += [_plain(row.layers), _plain(row.hidden), heads, short] if wide else []
        table.add_row(*cells)
    return table


def _plain(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _tokens(value: int | None) -> str:
    """Format a context length; 128k is 131,072."""
    return _plain(value) if value is None or value % 1024 else f"{value // 1024}k"


def _short(value: int) -> str:
    return f"{value / 1e9:,.1f} B" if value >= 1e9 else f"{value / 1e6:,.1f} M"
