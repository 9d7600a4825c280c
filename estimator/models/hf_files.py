"""Models as files: a directory with a config.json, and the local cache of the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from estimator.errors import UserError
from estimator.models import diffusion, hf_config
from estimator.models.spec import ModelSpec
from estimator.untrusted import read_json_object


def read_directory(folder: Path, name: str | None = None) -> ModelSpec:
    """Read the shape of a model folder in Hugging Face's layout; ``name``: by default that of the folder.

    Raises UserError where there is no config.json or it cannot be used.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "model_index.json").is_file():
            return diffusion.read_directory(folder, name or folder.name)
        raise UserError(f"{folder} has no config.json.", "Give a folder in Hugging Face's layout.")
    config = read_json_object(path)
    return hf_config.to_spec(config, name or folder.name)


def cached(hf_id: str) -> Path | None:
    """Return the folder of that model in the Hub's local cache; None if it has no config.json.

    The cache's layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repository = hub_cache() / f"models--{hf_id.replace('/', '--')}"
    reference = repository / "refs" / "main"
    snapshots = sorted(
        (repository / "snapshots").glob("*/config.json"), key=lambda path: path.stat().st_mtime
    )
    if reference.is_file():
        snapshots.append(repository / "snapshots" / reference.read_text().strip() / "config.json")
    folders = [path.parent for path in snapshots if path.is_file()]
    return folders[-1] if folders else None


def hub_cache() -> Path:
    """Return the cache folder of huggingface_hub: HF_HUB_CACHE, or ``hub`` under HF_HOME."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "hub"
