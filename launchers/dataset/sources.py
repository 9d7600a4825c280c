"""Sources of datasets: built-in, a local file or folder, S3, the Hugging Face Hub.

Every dataset is fetched as a file, or as a folder in the format of ``save_to_disk``. ``NAME#SPLIT`` selects a
split of a folder or of a Hub dataset; the default split is ``train``.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

from estimator import remote
from estimator.errors import UserError
from estimator.untrusted import list_contained_files, parse_json, plain_name, read_text
from launchers.dataset import drawn_shapes, files, python_docs, support_tickets
from launchers.dataset.progress import Progress

_log = logging.getLogger(__name__)

TICKETS = support_tickets.NAME
PYTHON_DOCS = "python-docs"
IMAGES_BUILT_IN = drawn_shapes.BUILT_IN
BUILT_IN_SPLITS: dict[str, tuple[str, ...]] = {  # name of a generated dataset -> its splits
    TICKETS: support_tickets.SPLITS,
    PYTHON_DOCS: ("train",),
    IMAGES_BUILT_IN: ("train",),
}
DEFAULT = TICKETS
Kind = Literal["built-in", "path", "s3", "hub"]
SUFFIXES = (*files.SUFFIXES, ".txt")  # a name with such a suffix is a path, even if the file is missing
SPLIT = "train"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tar")
_SPLITS = "dataset_dict.json"  # file in a save_to_disk folder with several splits
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")  # org/name, or org/name:configuration


def kind_of(dataset: str) -> Kind:
    """Return the type of source that a dataset name refers to. The name of an existing file is a path."""
    if dataset.partition("#")[0] in BUILT_IN_SPLITS:
        return "built-in"
    if dataset.startswith("s3://"):
        return "s3"
    name, _ = split_of(dataset)
    path = Path(name).expanduser()
    is_path = path.is_absolute() or dataset.startswith(".") or path.suffix.lower() in SUFFIXES
    if is_path or path.exists():
        return "path"
    return "hub" if _HUB_ID.fullmatch(name) else "path"


def split_of(dataset: str) -> tuple[str, str | None]:
    """Split NAME#SPLIT into name and split (None: not given), unless a file of that name exists."""
    name, _, split = dataset.rpartition("#")
    return (name, split) if name and not Path(dataset).expanduser().exists() else (dataset, None)


def fetch(dataset: str, folder: Path) -> Path:
    """Return the path of the dataset's file or folder, fetched into ``folder`` unless it is local.

    Hub datasets are converted to JSONL; those with images to a folder in the format of save_to_disk. Raises
    UserError with the reason if the dataset is unavailable. The rows are not checked (see rows.read).
    """
    kind = kind_of(dataset)
    _log.info("Dataset %s: %s", dataset, kind)
    if kind == "built-in":
        return _generated(dataset, folder)
    if kind == "path":
        return local_path(dataset)
    return _from_s3(dataset, folder) if kind == "s3" else _from_hub(dataset, folder)


def _generated(dataset: str, folder: Path) -> Path:
    """Generate a built-in dataset; raises UserError if it has no such split."""
    name, _, split = dataset.partition("#")
    splits = BUILT_IN_SPLITS[name]
    if split and split not in splits:
        raise UserError(
            f"Dataset {name} has no split {split}.",
            f"Use {', or '.join(f'{name}#{option}' for option in splits)}.",
        )
    if name == IMAGES_BUILT_IN:
        return drawn_shapes.write(folder / name)
    if name == PYTHON_DOCS:
        return python_docs.write(folder / f"{name}.jsonl")
    if split == "test":
        return support_tickets.write(folder / f"{name}-test.jsonl", "test")
    return support_tickets.write(folder / f"{name}.jsonl")


def local_path(dataset: str) -> Path:
    """Return the path of a local dataset, or of its split; raises UserError if it does not exist."""
    name, split = split_of(dataset)
    path = Path(name).expanduser()
    if "://" in name and not path.exists():
        repository = remote.hub_id_of_page(name)
        command = f"Download it: curl -fLO {shlex.quote(name)}" if name.startswith("http") else "Download it."
        advice = command if repository is None else f"Use --dataset {repository}"
        raise UserError(f"Dataset {name} is an address that cannot be read.", advice)
    if not path.exists():
        raise UserError(
            f"There is no dataset {path}.",
            "Check the path, or use s3://bucket/key, a Hugging Face id (org/name) or a generated dataset: "
            f"{', '.join(BUILT_IN_SPLITS)}.",
        )
    if path.is_dir():
        list_contained_files(path)
        return _in_folder(path, split)
    if split is not None:
        raise UserError(f"Dataset {path} is a file: it has no split {split}.", f"Use {path}")
    return path


def _in_folder(folder: Path, split: str | None) -> Path:
    """Return the path of a split in a folder of save_to_disk, or of files named after splits."""
    if files.is_saved(folder):
        if split is not None:
            raise UserError(f"Dataset {folder} is one split: there is no {split} in it.", f"Use {folder}")
        return folder
    if split is None and holds_images(folder):
        return folder
    if (folder / _SPLITS).is_file():
        splits = {name: folder / name for name in _splits(folder)}
    else:
        splits = {
            path.stem: path
            for path in sorted(folder.iterdir())
            if path.is_file() and path.suffix.lower() in SUFFIXES
        }
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    chosen = splits.get(split or SPLIT)
    if chosen is None:
        if not splits:
            raise UserError(f"Dataset {folder} is a folder without rows.", f"Use {files.FORMS}.")
        raise UserError(
            f"Dataset {folder} has {', '.join(splits)}, but no split {split or SPLIT}.",
            f"Use one of them, e.g. {folder}#{next(iter(splits))}",
        )
    return chosen


def holds_images(folder: Path) -> bool:
    """Whether a folder is an image dataset: it contains image files or tar files."""
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir())


def _splits(folder: Path) -> list[str]:
    """Read the names of the splits in a save_to_disk folder; raises UserError."""
    try:
        names = parse_json(read_text(folder / _SPLITS))["splits"]
        return [plain_name(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"Dataset {folder}: {_SPLITS} cannot be read.", "Save the dataset again.") from None


def _from_s3(url: str, folder: Path) -> Path:
    """Download a file from S3 into ``folder``; raises UserError."""
    bucket, key = remote.s3_location(url)
    target = folder / Path(key).name
    client = remote.s3_client()
    with remote.s3_errors(url):
        remote.s3_download(client, bucket, key, target)
    return target


def _from_hub(dataset: str, folder: Path) -> Path:
    """Download a Hub dataset, and convert it to a file or folder in ``folder``; raises UserError."""
    full_name, split = split_of(dataset)
    name, _, configuration = full_name.partition(":")
    rows = _load_from_hub(name, configuration or None, split or SPLIT)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (re.sub(r"[/:#]", "--", dataset) + ".jsonl")
    if _has_media(rows):
        return _save(rows, target.with_suffix(".saved"))
    temporary = target.with_name(target.name + ".part")
    progress = Progress(f"reading {dataset}", len(rows))
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, start=1):
                file.write(json.dumps(row, default=str) + "\n")
                progress.at(number)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _has_media(rows: Any) -> bool:
    """Whether rows contain images or other media, which JSON cannot represent."""
    from datasets.features.features import require_decoding

    return any(require_decoding(feature) for feature in rows.features.values())


def _save(rows: Any, target: Path) -> Path:
    """Save rows atomically with save_to_disk, which stores images encoded; return the folder."""
    temporary = target.with_name(target.name + ".part")
    try:
        rows.save_to_disk(str(temporary))
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _load_from_hub(name: str, configuration: str | None, split: str) -> Any:
    """Load a split with ``datasets.load_dataset``; raises UserError."""
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
            return datasets.load_dataset(name, configuration, split=split, token=remote.hub_token())
        except DatasetsError as error:
            if isinstance(error, FileNotFoundError):  # missing, gated, or offline
                raise
            raise UserError(f"Dataset {name} cannot be read: {_first_line(error)}") from None
        except ValueError as error:  # no such configuration or split
            raise UserError(
                f"Dataset {name}: {_first_line(error)}",
                f"Write {name}:configuration to choose one, and {name}#split for another split than {SPLIT}.",
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
