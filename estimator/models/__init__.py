"""Table of known models, and resolution of names, Hugging Face ids, folders and s3:// URLs.

To add a model of a known family, add a row to ``data/models.csv``; families are in
``estimator/models/architectures.py``. A blank cell has the family's value, otherwise the field's default.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from estimator import remote
from estimator.data import load_rows, parse_row
from estimator.errors import UserError
from estimator.models import diffusion, hf_files, remote_shapes
from estimator.models.architectures import (
    ATTENTION_PROJECTIONS,
    COMPRESSED_PROJECTIONS,
    FAMILIES,
    LATENT_PROJECTIONS,
    PROJECTIONS,
    RECURRENT_PROJECTIONS,
)
from estimator.models.diffusion import DiffusionSpec
from estimator.models.reference import Kind, ModelRef, ModelSource
from estimator.models.shape import ModelShape
from estimator.models.spec import ModelSpec
from estimator.names import did_you_mean
from estimator.option_checks import check_type

_log = logging.getLogger(__name__)

__all__ = [
    "ATTENTION_PROJECTIONS",
    "COMPRESSED_PROJECTIONS",
    "FAMILIES",
    "LATENT_PROJECTIONS",
    "PROJECTIONS",
    "RECURRENT_PROJECTIONS",
    "DiffusionSpec",
    "ModelRef",
    "ModelSource",
    "ModelSpec",
    "aliases",
    "find",
    "known",
    "locate",
    "names",
    "resolve",
]

TABLE = Path(__file__).parents[1] / "data" / "models.csv"
UNSUPPORTED = TABLE.with_name("unsupported_models.csv")  # names that users ask for
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find(name: str) -> ModelSpec:
    """Return the model with that name, alias or Hugging Face id in the table.

    Raises UserError with similar names if there is none.
    """
    _check_name(name)
    model = _table().get(_normal(name)) or diffusion.MODELS.get(_normal(name))
    if model is None:
        reason, advice = _nearest(name)
        raise UserError(f"There is no model {name!r} in the model table{reason}.", advice)
    return model


def _check_name(name: object) -> None:
    check_type("model", name, str, "Give a name, a Hugging Face id, or the path of a folder.")
    if not str(name).strip():
        raise UserError("The name of the model is empty.", "`finetune models` lists the known names.")


def known(name: str) -> bool:
    """Return whether the model table has that name."""
    return _normal(name) in _table() or _normal(name) in diffusion.MODELS


def locate(name: str) -> ModelSource:
    """Resolve a model's name by the table and the local disk only.

    A name of the table takes precedence over a folder of that name (write ``./name`` for the folder), and an
    existing folder over a Hugging Face id. Raises UserError for a missing folder or an unknown name.
    """
    _check_name(name)
    if name.startswith("s3://"):
        remote.s3_location(name)
        return ModelSource(kind="s3", name=name, location=name.rstrip("/"))
    folder = Path(name).expanduser()
    if folder.is_absolute() or name.startswith((".", "~")):
        if not folder.is_dir():
            raise UserError(f"There is no model directory {folder}.", "Give a folder with config.json in it.")
        return ModelSource(kind="folder", name=name, location=str(folder.resolve()))
    if "/" not in name and (known(name) or not folder.is_dir()):
        spec = find(name)
        kind: Kind = "table" if spec.hf_id else "made"
        return ModelSource(kind=kind, name=name, location=spec.hf_id or "")
    if folder.is_dir():
        return ModelSource(kind="folder", name=name, location=str(folder.resolve()))
    if _HUB_ID.fullmatch(name):
        return ModelSource(kind="hub", name=name, location=name)
    if "://" in name:
        repository = remote.hub_id_of_page(name)
        advice = "Give a Hugging Face id (org/name), a folder, or s3://bucket/prefix."
        raise UserError(
            f"Model {name} is an address that cannot be read.",
            advice if repository is None else f"Use --model {repository}",
        )
    raise UserError(f"There is no model directory {name}.", "finetune models shows the known names.")


def resolve(name: str | Path, *, online: bool = False) -> ModelRef:
    """Resolve the name of a model, or the path of its folder: its location and its shape.

    Used by ``finetune`` and by runs. Reads config.json of an s3:// URL; looks up a Hugging Face id in the
    table, in the Hub's local cache and, with ``online``, on the Hub. Raises UserError for an unavailable or
    invalid config.json.
    """
    source = locate(str(name.absolute()) if isinstance(name, Path) else name)
    _log.debug("Model %s: %s %s", name, source.kind, source.location or "(generated)")
    return ModelRef(
        kind=source.kind, name=source.name, location=source.location, spec=_spec_of(source, online=online)
    )


def _spec_of(source: ModelSource, *, online: bool) -> ModelSpec:
    if source.kind in ("made", "table"):
        return find(source.name)
    if source.kind == "folder":
        return hf_files.read_directory(Path(source.location), source.name)
    if source.kind == "s3":
        return remote_shapes.of_s3(source.location, source.name)
    if known(source.location):
        return find(source.location)
    cached = hf_files.cached(source.location)
    if cached is not None:
        return hf_files.read_directory(cached, source.name)
    if online:
        return remote_shapes.of_hub(source.location, source.name)
    raise UserError(
        f"Model {source.name} is neither in the model table nor in the local cache ({hf_files.hub_cache()}).",
        f"Fetch its shape: hf download {source.name} config.json",
    )


def names() -> list[str]:
    """Return the names of the table's language models, in its order."""
    return list(dict.fromkeys(model.name for model in _table().values()))


def aliases(name: str) -> list[str]:
    """List the other names of a language model, including Hugging Face ids."""
    model = find(name)
    return [key for key, value in _models_by_key().items() if value is model and key != model.name]


def _nearest(name: str) -> tuple[str, str]:
    """Return why a model has no name here ("" if that is unknown), and advice with similar names."""
    for prefix, (nearest, reason) in _unsupported().items():
        if _normal(name).startswith(prefix):
            return (
                f": {reason}",
                f"{'Use' if '/' in nearest else 'The nearest supported model:'} --model {nearest}",
            )
    rows: dict[str, ModelSpec | DiffusionSpec] = {**_table(), **diffusion.MODELS}
    suggestion = did_you_mean(_normal(name), rows, shown={key: row.name for key, row in rows.items()})
    return "", f"{suggestion} A Hugging Face id or a local directory works too.".lstrip()


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


# ---------------------------------------------------------------------------------------------------------
# Reading the table


@lru_cache(maxsize=1)
def _table() -> dict[str, ModelSpec]:
    rows: dict[str, ModelSpec] = {}
    for key, model in _models_by_key().items():
        if rows.setdefault(_normal(key), model) is not model:
            raise ValueError(f"{TABLE.name}: {key} names two models")
    return rows


@lru_cache(maxsize=1)
def _unsupported() -> dict[str, tuple[str, str]]:
    """Return nearest supported model and reason of names that users ask for, by the name's beginning."""
    return {row["name"]: (row["nearest"], row["reason"]) for row in load_rows(UNSUPPORTED)}


@lru_cache(maxsize=1)
def _models_by_key() -> dict[str, ModelSpec]:
    """Return the models by name, id and alias, as written in the table."""
    rows: dict[str, ModelSpec] = {}
    for row in load_rows(TABLE):
        model = _from_row(row)
        for key in (model.name, row["hf_id"], *row["aliases"].split()):
            if key and rows.setdefault(key, model) is not model:
                raise ValueError(f"{TABLE.name}: {key} names two models")
    return rows


def _from_row(row: Mapping[str, str]) -> ModelSpec:
    family = FAMILIES.get(row["family"])
    return ModelSpec(**{**(family.traits() if family else {}), **parse_row(ModelShape, row)})
