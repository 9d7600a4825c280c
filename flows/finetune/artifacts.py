"""Inputs and outputs of a run: weights, stored once per cluster, and the finished model with its page.

The launching process passes two things to the tasks, next to the plan, in ``FINETUNE_STAGED``: the resolved
model, and the datastore keys of local files that it has stored for a remote run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from decorators.packed_plan import STAGED_VARIABLE
from decorators.storage import MetaflowStorage, datastore
from estimator import models, remote, untrusted
from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.models import ModelRef, ModelSource
from estimator.plan import Plan
from estimator.terminal import print
from estimator.vocabulary import IMAGE_TASK
from flows.commands.flow_commands import command_line
from launchers import engines
from launchers.cluster.processes import sigterm_raises
from launchers.dataset import files, mixture, sources
from launchers.dataset.stored import StoredRows
from launchers.images import attached, pictures
from launchers.inference.finished import fetch_cached
from launchers.results import model_card
from launchers.results.model_card import Facts, cache_folder, cache_name, slug
from launchers.run import preparation
from launchers.run_config import RunConfig
from launchers.settings import Settings
from launchers.store.bundles import fetch_files, get_bundle, has_bundle, put_bundle, put_files, sha256_of

# Data from the launching process for the tasks


def carry(model: ModelRef, datasets: dict[str, str] | None = None) -> None:
    """Pass the model, and the keys of datasets by the user's names, on to every task of this run."""
    values = {"model": model.to_dict(), "datasets": datasets or {}}
    os.environ[STAGED_VARIABLE] = untrusted.pack(json.dumps(values))


def carried_model(name: str) -> ModelRef:
    """Return the model of this run as resolved by the launching process.

    A deployed flow may be started with another model than at deployment, which is resolved here.
    """
    values = _staged().get("model")
    if values is not None and values["name"] == name:
        return ModelRef.from_dict(values)
    return models.resolve(name, online=True)


def _staged() -> dict[str, Any]:
    """Return what the launching process passed to this task (:func:`carry`); empty for a deployed flow."""
    text = os.environ.get(STAGED_VARIABLE)
    try:
        values: dict[str, Any] = untrusted.parse_json(untrusted.unpack(text)) if text else {}
    except ValueError as error:
        raise UserError(
            f"{STAGED_VARIABLE} cannot be read: {error}.", "Launch the run again, or deploy the flow again."
        ) from None
    return values


def stage(settings: Settings, model: ModelRef) -> tuple[ModelRef, dict[str, str]]:
    """Store the local datasets and model folder of these settings in the datastore.

    Returns the model in the form for remote tasks, and the keys of the datasets by the user's names.
    """
    store = datastore(shared=True)
    with remote.s3_errors(store.describe("staged")) if store.kind == "s3" else nullcontext():
        datasets: dict[str, str] = {}
        for dataset in (*mixture.names(settings), settings.evaluation.dataset):
            if dataset is not None and sources.kind_of(dataset) == "path":
                datasets[dataset] = _stage_dataset(store, sources.local_path(dataset), settings)
        if model.kind == "folder":
            location = stage_folder(
                store,
                model,
                vision=settings.vision is not None,
                trust_remote_code=settings.trust_remote_code,
            )
            model = dataclasses.replace(model, kind="stored", location=location)
        return model, datasets


def stage_folder(
    store: MetaflowStorage,
    model: ModelSource,
    *,
    rewards: bool = False,
    vision: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Store a local model or reward model in the datastore; return the key of its bundle.

    Code of its folder is stored with it, and not run here.
    """
    key = f"staged/{_fingerprint(Path(model.location))}"
    folder = cache_folder() / slug(model.name)
    fetched = preparation.fetch_weights(
        model,
        folder,
        rewards=rewards,
        vision=vision,
        trust_remote_code=trust_remote_code,
        runs_code=False,
    )
    put_bundle(store, key, fetched)
    return key


def _stage_dataset(store: MetaflowStorage, path: Path, settings: Settings) -> str:
    if path.is_file():
        named_images = pictures.named_files(path) if settings.task == IMAGE_TASK else {}
        if settings.vision is not None:
            named_images = attached.named_files(path, settings.columns)
        return stage_files(store, {**named_images, path.name: path})
    key = f"staged/{_fingerprint(path)}"
    put_bundle(store, key, path)
    return key


def stage_file(store: MetaflowStorage, path: Path) -> str:
    """Store a file in the datastore as a separate bundle; return the bundle's key."""
    return stage_files(store, {path.name: path})


def stage_files(store: MetaflowStorage, files: Mapping[str, Path]) -> str:
    """Store files under these names in the datastore as a separate bundle; return the bundle's key."""
    contents = [(name, sha256_of(path)) for name, path in sorted(files.items())]
    key = f"staged/{hashlib.sha256(repr(contents).encode()).hexdigest()[:32]}"
    if not has_bundle(store, key):
        put_files(store, key, files)
    return key


def _fingerprint(folder: Path) -> str:
    """Hash names, sizes and times of files: reading hundreds of gigabytes would take too long."""
    facts = [
        (str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256(repr((str(folder), facts)).encode()).hexdigest()[:32]


# Inputs of tasks


def fetch_dataset(dataset: str, folder: Path) -> Path:
    """Return the dataset as a file or folder on this machine; download it if necessary."""
    key = staged_key(dataset)
    if key is None:
        return sources.fetch(dataset, folder)
    get_bundle(datastore(shared=True), key, folder)
    target = folder / Path(sources.split_of(dataset)[0]).name
    if target.is_file():  # alone, or together with the images that it names
        return target
    is_dataset_folder = files.is_saved(folder) or sources.holds_images(folder)
    return folder if is_dataset_folder else next(path for path in folder.iterdir() if path.is_file())


def store_rows(store: MetaflowStorage, rows: Sequence[StoredRows | None], folder: Path) -> str:
    """Store checked rows from ``folder`` in the datastore; return the bundle's key."""
    names = " ".join(stored.fingerprint for stored in rows if stored is not None)
    key = f"rows/{hashlib.sha256(names.encode()).hexdigest()[:32]}"
    if not has_bundle(store, key):
        put_bundle(store, key, folder)
    return key


def staged_key(name: str) -> str | None:
    """Return the key under which the launching process stored a local file or folder; None if it did not."""
    key: str | None = _staged().get("datasets", {}).get(name)
    return key


def fetch_weights_once(
    model: ModelSource,
    work_dir: Path,
    *,
    rewards: bool = False,
    vision: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Fetch and check a model's weights; returns a folder of this machine or a bundle's key (shared).

    With a local datastore the weights stay in place (or in this machine's cache). With a shared one this task
    downloads them into the datastore, and every node reads them from there. ``rewards``: the model is a
    reward model. ``vision``: keep the vision tower of a multimodal model. ``trust_remote_code``: the model
    may need code of its folder, which is run here to check the weights.
    """
    options = {"rewards": rewards, "vision": vision, "trust_remote_code": trust_remote_code}
    if model.kind == "stored":
        return model.location
    store = datastore(shared=True)
    if store.is_local:
        return str(fetch_cached(model, **options))
    key = f"weights/{cache_name(model) if model.kind == 'made' else slug(model.location or model.name)}"
    key += "-vision" if vision else ""
    if has_bundle(store, key):
        print(f"weights of {model.name}: already in {store.describe(key)}")
        return key
    fetched = preparation.fetch_weights(model, work_dir / slug(model.name), **options)
    manifest = put_bundle(store, key, fetched)
    print(f"weights of {model.name}: {format_bytes(manifest.total_bytes)} in {store.describe(key)}")
    return key


def fetch_bundle(storage: MetaflowStorage, reference: str, folder: Path) -> Path:
    """Return a folder on this machine with the content of ``reference`` (a path or a bundle's key)."""
    if Path(reference).is_absolute():
        return Path(reference)
    get_bundle(storage, reference, folder)
    return folder


def fetch_model(reference: str, folder: Path) -> Path:
    """Fetch the weights that :func:`fetch_weights_once` named into a folder on this machine."""
    return fetch_bundle(datastore(shared=True), reference, folder)


def fetch_tokenizer(reference: str, folder: Path) -> Path:
    """Return a folder with the model's configuration and tokenizer, without the weights of a bundle."""
    if Path(reference).is_absolute():
        return Path(reference)
    fetch_files(
        datastore(shared=True), reference, folder, include=lambda name: not name.endswith(".safetensors")
    )
    return folder


# Outputs of a run


def export(
    *,
    storage: MetaflowStorage,
    output: str,
    run: str,
    plan: Plan,
    settings: RunConfig,
    model: ModelRef,
    facts: Facts,
    flow: str = "finetune",
) -> str:
    """Store the finished model for the user; return its folder, or its bundle's address.

    A run on this machine writes ``output_dir/RUN/model`` (and ``adapter``), loadable by transformers, or the
    adapter alone if it cannot be merged. A remote run leaves the model in the datastore;
    ``decorators.fetch_model`` downloads it. ``flow``: prefix of the file name of the flow that ran.
    """
    if not storage.is_local:
        return storage.describe(output)
    destination = Path(settings.output_dir).expanduser().resolve() / run
    temporary = destination.with_name(f".{run}.partial")
    command = command_line(f"{flow}_flow.py", ["--config", "settings", "settings.yaml", "run"])
    with sigterm_raises():
        try:
            get_bundle(storage, output, temporary)
            model_card.write_records(temporary, plan, settings, facts, model=model, command=command)
            shutil.rmtree(destination, ignore_errors=True)
            temporary.rename(destination)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(engines.result_of(destination))
