"""What goes in and out of a run: the weights, once for the cluster; the finished model, with its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from decorators.profile.measured import Measured
from decorators.storage import MetaflowStorage, datastore
from estimator.errors import UserError
from estimator.models import ModelSpec, hf_config
from estimator.plan import GIB, Plan
from flows import staging
from launchers import model_card
from launchers.evaluate import EvaluationResult
from launchers.model_card import cache_folder, slug
from launchers.models import weights
from launchers.report.metrics import Summary
from launchers.store.bundles import fetch_files, get_bundle, has_bundle, put_bundle, read_manifest


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
    staged = staging.key_of(model)
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
    staged = staging.key_of(model)
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
