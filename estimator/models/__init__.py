"""The table of known models, and shapes by name, Hugging Face id or directory.

To add a model of a known family, add a row to ``data/models.csv``; families are in
``estimator/models/architectures.py``. A blank cell is the field's default, or what the family says.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.models import diffusion, hf_files
from estimator.models.architectures import (
    ATTENTION_PROJECTIONS,
    FAMILIES,
    LATENT_PROJECTIONS,
    MLP_PROJECTIONS,
    PROJECTIONS,
)
from estimator.models.diffusion import DiffusionSpec
from estimator.models.shape import ModelShape
from estimator.models.spec import ModelSpec

__all__ = [
    "ATTENTION_PROJECTIONS",
    "FAMILIES",
    "LATENT_PROJECTIONS",
    "MLP_PROJECTIONS",
    "PROJECTIONS",
    "DiffusionSpec",
    "ModelSpec",
    "aliases",
    "find",
    "find_any",
    "known",
    "names",
    "resolve",
]

TABLE = Path(__file__).parents[1] / "data" / "models.csv"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find(name: str) -> ModelSpec:
    """The language model of that name, alias or Hugging Face id of the table.

    Raises UserError with the nearest names where there is none, and for a diffusion model.
    """
    model = find_any(name)
    if isinstance(model, DiffusionSpec):
        raise UserError(
            f"{model.name} is not a language model, and the flow trains language models only.",
            f"Its memory: finetune estimate --model {model.name}",
        )
    return model


def find_any(name: str) -> ModelSpec | DiffusionSpec:
    """Like :func:`find`, with the diffusion models."""
    model = _table().get(_normal(name)) or diffusion.MODELS.get(_normal(name))
    if model is None:
        raise UserError(f"There is no model {name!r} in the model table.", _nearest(name))
    return model


def known(name: str) -> bool:
    """Whether :func:`find_any` finds it."""
    return _normal(name) in _table() or _normal(name) in diffusion.MODELS


def resolve(name: str) -> ModelSpec:
    """The shape of the language model that ``name`` stands for, without any network.

    In this order: a name or alias of the table, a directory with a config.json, a Hugging Face id of the
    table, one in the Hub's local cache. Raises UserError that says how to get it, or what is wrong with its
    config.json.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and ("/" in name or not known(name)):
        return hf_files.read_directory(folder, name)
    if known(name):
        return find(name)
    if folder.is_absolute() or name.startswith((".", "~")):
        raise UserError(f"There is no model directory {folder}.", "Give a folder with config.json in it.")
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"There is no model {name!r} in the model table.", _nearest(name))
    cached = hf_files.cached(name)
    if cached is None:
        raise UserError(
            f"Model {name} is neither in the model table nor in the local cache ({hf_files.hub_cache()}).",
            f"Fetch its shape: hf download {name} config.json",
        )
    return hf_files.read_directory(cached, name)


def names() -> list[str]:
    """The names of the table's language models, in its order."""
    return list(dict.fromkeys(model.name for model in _table().values()))


def aliases(name: str) -> list[str]:
    """What else that language model is called, its Hugging Face ids included."""
    model = find(name)
    return [key for key, value in _written().items() if value is model and key != model.name]


def _nearest(name: str) -> str:
    rows: dict[str, ModelSpec | DiffusionSpec] = {**_table(), **diffusion.MODELS}
    near = difflib.get_close_matches(_normal(name), rows, n=3, cutoff=0.5)
    offered = dict.fromkeys(rows[key].name for key in near)
    return (f"Did you mean {', '.join(offered)}? " if offered else "") + (
        "A Hugging Face id or a local directory works too."
    )


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


# ---------------------------------------------------------------------------------------------------------
# Reading the table


@lru_cache(maxsize=1)
def _table() -> dict[str, ModelSpec]:
    rows: dict[str, ModelSpec] = {}
    for key, model in _written().items():
        if rows.setdefault(_normal(key), model) is not model:
            raise ValueError(f"{TABLE.name}: {key} names two models")
    return rows


@lru_cache(maxsize=1)
def _written() -> dict[str, ModelSpec]:
    """Names, ids and aliases as the table writes them."""
    rows: dict[str, ModelSpec] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = _from_row(row)
            for key in (model.name, row["hf_id"], *row["aliases"].split()):
                if key and rows.setdefault(key, model) is not model:
                    raise ValueError(f"{TABLE.name}: {key} names two models")
    return rows


def _from_row(row: Mapping[str, str]) -> ModelSpec:
    values = {name: _parser(name)(text) for name, text in row.items() if text and name != "aliases"}
    family = FAMILIES.get(row["family"])
    return ModelSpec(**{**(family.traits() if family else {}), **values})


def _parser(field: str) -> Callable[[str], Any]:
    """How a cell of that column is read; the column is called like the field of ModelShape."""
    kind = ModelShape.__annotations__[field]
    if kind.startswith("int"):
        return int
    if kind.startswith("float"):
        return float
    return (lambda text: text == "1") if kind == "bool" else str
