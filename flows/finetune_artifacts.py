"""What goes in and out of a run: the weights, once for the cluster; the finished model, with its page.

Local files of a run that goes elsewhere are put into the datastore where it is launched, and found by tasks:
``FINETUNE_STAGED`` maps what the user wrote (a dataset's path, a model's folder) to a bundle's key, and
travels with the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from decorators.gpu_profile import STAGED_VARIABLE
from decorators.profile.measured import Measured
from decorators.storage import MetaflowStorage, datastore
from estimator import remote
from estimator.errors import UserError
from estimator.models import ModelSpec, hf_config
from estimator.plan import GIB, Plan
from launchers import model_card
from launchers.dataset import sources
from launchers.evaluate import EvaluationResult
from launchers.model_card import cache_folder, slug
from launchers.models import weights
from launchers.models.files import check_complete
from launchers.report.metrics import Summary
from launchers.settings import Settings
from launchers.store.bundles import (
    fetch_files,
    get_bundle,
    has_bundle,
    put_bundle,
    read_manifest,
    sha256_of,
)


def local_copy(storage: MetaflowStorage, reference: str, folder: Path) -> Path:
    """A folder on this machine that holds what ``reference`` (a path or a bundle's key) names."""
    if Path(reference).is_absolute():
        return Path(reference)
    get_bundle(storage, reference, folder)
    return folder


def weights_once(model: str, work: Path) -> str:
    """Fetch and check a model's weights; returns a folder of this machine or a bundle's key (shared).

    With a datastore on this machine the weights stay where they are (or in this machine's cache). With a
    shared one they are fetched by this one task and kept there, and every node takes them from there.
    """
    store = datastore(shared=True)
    staged = key_of(model)
    if staged is not None:
        return staged
    ref = weights.resolve(model)
    if store.is_local:
        return str(weights.fetch(ref, cache_folder() / slug(model)).resolve())
    key = f"weights/{slug(ref.location or ref.name)}"
    if has_bundle(store, key):
        print(f"weights of {model}: already in {store.describe(key)}")
        return key
    manifest = put_bundle(store, key, weights.fetch(ref, work / "weights"))
    print(f"weights of {model}: {manifest.total_bytes / GIB:.2f} GiB in {store.describe(key)}")
    return key


def model_folder(reference: str, folder: Path) -> Path:
    """What :func:`weights_once` has named, as a folder on this machine."""
    return local_copy(datastore(shared=True), reference, folder)


def tokenizer_folder(reference: str, folder: Path) -> Path:
    """A folder with the model's configuration and tokenizer; of a bundle, the weights stay where they are."""
    if Path(reference).is_absolute():
        return Path(reference)
    fetch_files(
        datastore(shared=True), reference, folder, wanted=lambda name: not name.endswith(".safetensors")
    )
    return folder


def spec_of(model: str) -> ModelSpec:
    """The model's shape, also of a folder that lies on the launching machine only."""
    staged = key_of(model)
    if staged is None:
        return weights.spec_of(weights.resolve(model))
    store = datastore(shared=True)
    manifest = read_manifest(store, staged)
    config = next(file for file in manifest.files if file.name == "config.json") if manifest else None
    if config is None:
        raise UserError(f"{model} was staged in {store.describe(staged)} and is no longer there.")
    return hf_config.to_spec(json.loads(store.get_bytes(f"{staged}/{config.key}")), model)


def export(
    *,
    storage: MetaflowStorage,
    output: str,
    run: str,
    plan: Plan,
    settings: dict[str, Any],
    facts: list[tuple[str, str]],
) -> str:
    """Put the finished model where the user can take it; returns its folder, or its bundle's address.

    A run on this machine gets ``output_dir/RUN/model`` (and ``adapter``), loadable by transformers. A run
    elsewhere leaves it in the datastore, from where ``decorators.fetch_model`` brings it.
    """
    if not storage.is_local:
        return storage.describe(output)
    destination = Path(settings["output_dir"]).expanduser().resolve() / run
    temporary = destination.with_name(f".{run}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    get_bundle(storage, output, temporary)
    again = "python flows/finetune_flow.py --config settings settings.yaml run"
    model_card.write_records(temporary, plan, settings, facts, again=again)
    shutil.rmtree(destination, ignore_errors=True)
    temporary.rename(destination)
    return str(destination / "model")


def closing_facts(
    plan: Plan, summary: Summary, measured: Measured, evaluation: EvaluationResult
) -> list[tuple[str, str]]:
    """Predicted beside measured, and what was learnt, as rows of (what, value)."""
    return model_card.closing_facts(plan, summary, measured.memory_peak_bytes, evaluation)


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
