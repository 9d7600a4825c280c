"""Local files of a run that goes elsewhere: put into the datastore where it is launched, found by tasks.

``FINETUNE_STAGED`` maps what the user wrote (a dataset's path, a model's folder) to a bundle's key, and
travels with the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

from decorators.gpu_profile import STAGED_VARIABLE
from decorators.storage import MetaflowStorage, datastore
from estimator import remote
from launchers.dataset import sources
from launchers.models import weights
from launchers.models.files import check_complete
from launchers.settings import Settings
from launchers.store.bundles import get_bundle, has_bundle, put_bundle, sha256_of


def stage(wanted: Settings) -> None:
    """Upload the local dataset, held-out dataset and model folder that these settings name."""
    store = datastore(shared=True)
    with remote.s3_errors(store.describe("staged")) if store.kind == "s3" else nullcontext():
        staged = _stage(wanted, store)
    if staged:
        os.environ[STAGED_VARIABLE] = json.dumps(staged)


def _stage(wanted: Settings, store: MetaflowStorage) -> dict[str, str]:
    staged: dict[str, str] = {}
    for dataset in (wanted.dataset, wanted.evaluation.dataset):
        if dataset is not None and sources.kind_of(dataset) == "path":
            path = Path(dataset).expanduser()
            staged[dataset] = key = f"staged/{sha256_of(path)[:32]}"
            if not has_bundle(store, key):
                with tempfile.TemporaryDirectory() as temporary:
                    (Path(temporary) / path.name).symlink_to(path.resolve())
                    put_bundle(store, key, Path(temporary))
    ref = weights.resolve(wanted.model)
    if ref.kind == "local":
        folder = Path(ref.location)
        check_complete(folder)
        staged[wanted.model] = key = f"staged/{_fingerprint(folder)}"
        put_bundle(store, key, folder)
    return staged


def key_of(name: str) -> str | None:
    """The key under which the launching machine has put what the user calls ``name``."""
    found: str | None = json.loads(os.environ.get(STAGED_VARIABLE, "{}")).get(name)
    return found


def dataset_file(dataset: str, folder: Path) -> Path:
    """The dataset as a JSONL file on this machine, wherever it comes from."""
    key = key_of(dataset)
    if key is None:
        return sources.fetch(dataset, folder)
    get_bundle(datastore(shared=True), key, folder)
    return next(path for path in folder.iterdir() if path.is_file())


def _fingerprint(folder: Path) -> str:
    """Of names, sizes and times: reading hundreds of gigabytes to find a name would take too long."""
    facts = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return hashlib.sha256(repr((str(folder), facts)).encode()).hexdigest()[:32]
