"""Where a dataset comes from: the built-in one, a local file, S3, the Hugging Face Hub. All end as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from estimator import remote
from estimator.errors import UserError
from launchers.dataset import python_docs

BUILT_IN = "python-docs"
Kind = Literal["built-in", "path", "s3", "hub"]
SUFFIXES = (".json", ".jsonl", ".txt", ".parquet")  # of names that are paths, there or not
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")  # org/name, or org/name:configuration


def kind_of(dataset: str) -> Kind:
    """Which source the setting ``dataset`` names. A file that exists is a path, whatever it looks like."""
    if dataset == BUILT_IN:
        return "built-in"
    if dataset.startswith("s3://"):
        return "s3"
    path = Path(dataset).expanduser()
    named = path.is_absolute() or dataset.startswith(".") or path.suffix.lower() in SUFFIXES
    if named or path.exists():
        return "path"
    return "hub" if _HUB_ID.fullmatch(dataset) else "path"


def fetch(dataset: str, folder: Path) -> Path:
    """The dataset as a local file: a local one in place, any other in ``folder``; of the Hub as JSONL.

    Raises UserError that says why it can't be had. The rows are not looked at: see rows.read.
    """
    kind = kind_of(dataset)
    if kind == "built-in":
        return python_docs.write(folder / f"{BUILT_IN}.jsonl")
    if kind == "path":
        return _local(dataset)
    return _from_s3(dataset, folder) if kind == "s3" else _from_hub(dataset, folder)


def _local(dataset: str) -> Path:
    path = Path(dataset).expanduser()
    if path.is_dir():
        raise UserError(f"Dataset {path} is a folder.", "Give one file.")
    if not path.exists():
        raise UserError(
            f"There is no dataset {path}.",
            f"Give a JSONL file, s3://bucket/key, a Hugging Face id (org/name), or {BUILT_IN}.",
        )
    return path


def _from_s3(url: str, folder: Path) -> Path:
    bucket, key = remote.s3_location(url)
    target = folder / Path(key).name
    client = remote.s3_client()
    with remote.s3_errors(url):
        remote.s3_download(client, bucket, key, target)
    return target


def _from_hub(dataset: str, folder: Path) -> Path:
    name, _, configuration = dataset.partition(":")
    rows = _load_from_hub(name, configuration or None)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (re.sub(r"[/:]", "--", dataset) + ".jsonl")
    temporary = target.with_name(target.name + ".part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, default=str) + "\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _load_from_hub(name: str, configuration: str | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "A dataset of the Hugging Face Hub needs the `datasets` package, which is not installed.",
            "pip install 'metaflow-finetune[train]'",
        ) from None
    from datasets.exceptions import DatasetsError

    with remote.hub_errors("dataset", name):
        try:
            return datasets.load_dataset(name, configuration, split="train", token=remote.hub_token())
        except DatasetsError as error:
            if isinstance(error, FileNotFoundError):  # not there, gated, or offline
                raise
            raise UserError(f"Dataset {name} can't be read: {_first_line(error)}") from None
        except ValueError as error:  # no such configuration or split
            raise UserError(
                f"Dataset {name}: {_first_line(error)}",
                f"Write {name}:configuration to choose one; the split must be called train.",
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
