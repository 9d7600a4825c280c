"""Finished models of runs, through Metaflow's client: by run, or the newest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from metaflow import Run, get_namespace, namespace
from metaflow.exception import MetaflowException

from decorators import _metaflow
from decorators.past_runs import ADVICE, NeverRunError, ended_tasks, find_run, runs_of
from decorators.storage import MetaflowStorage, fetch_model
from estimator import models
from estimator.errors import UserError
from launchers.inference import finished
from launchers.inference.finished import FinishedModel
from launchers.results.model_card import cache_folder
from launchers.store.bundles import read_manifest

if TYPE_CHECKING:
    from launchers.inference.manifests import Stored

FLOWS = ("FinetuneFlow", "LinearFinetuneFlow", "RejectionFlow")  # flows whose runs export a model
_EXPORT = "export"  # the step that stores the artifact model_path


def find(name: str | None) -> FinishedModel:
    """Return a model by run (an id or its last digits), folder or model name; by default of the newest run.

    A run's model in a remote datastore is downloaded to this machine's cache. Raises UserError if there is
    none.
    """
    if name is None:
        with _all_namespaces():
            return _newest()
    if Path(name).expanduser().is_dir() and not models.known(name):
        return finished.from_folder(Path(name))
    flow, _, run_id = name.rpartition("/")
    if flow in FLOWS or (not flow and (run_id.isdigit() or run_id.startswith(("argo-", "sfn-")))):
        with _all_namespaces():
            return _of_run(find_run((flow,) if flow else FLOWS, run_id))
    return finished.from_name(name)


def stored_in_s3(model: FinishedModel) -> Stored | None:
    """Return where pods find a run's model; None if it is in no S3 datastore."""
    if model.run is None:
        return None
    flow, _, run_id = model.run.rpartition("/")
    storage = MetaflowStorage(_metaflow.configured_storage(), f"{flow}/finetune")
    manifest = read_manifest(storage, f"models/{run_id}") if storage.kind == "s3" else None
    names = [PurePosixPath(file.name) for file in (manifest.files if manifest is not None else ())]
    configs = [name for name in names if name.name == "config.json"]
    if not configs:  # no model, or an adapter without its base
        return None
    from launchers.inference.manifests import Stored

    configuration = _metaflow.configuration()
    return Stored(
        address=storage.describe(f"models/{run_id}"),
        path=min(configs, key=lambda name: len(name.parts)).parent.as_posix(),
        endpoint=configuration.s3_endpoint,
        service_account=configuration.kubernetes_service_account,
        secrets=configuration.kubernetes_secrets,
    )


def load_model(run: Any = None, *, device: Literal["auto", "cuda", "cpu"] = "auto") -> tuple[Any, Any]:
    """Load the model of a run and its tokenizer, ready for transformers' ``generate``.

    An adapter is applied to its base model. The tokenizer has the chat template used in training, and the
    model's ``generation_config`` the end tokens.

    Parameters
    ----------
    run:
        A Metaflow ``Run``, a name as for :func:`find`, or None for the newest run with a model.
    device:
        ``auto``: all visible GPUs in bf16, or the CPU in fp32 if there are none.

    Raises
    ------
    UserError
        There is no such model, or by the estimate it does not fit into the free memory.
    """
    from launchers.inference import memory
    from launchers.inference.conversation import load_finetuned

    model = find(getattr(run, "pathspec", run))
    picked = memory.pick_device(device)
    memory.check_conversation(model, picked)
    with tempfile.TemporaryDirectory(prefix="finetune-load-") as folder:
        loaded = load_finetuned(model.fetched(), picked, Path(folder))
    return loaded.model, loaded.tokenizer


def _newest() -> FinishedModel:
    tasks = [task for flow in FLOWS if (task := _newest_export(flow)) is not None]
    if not tasks:
        raise UserError(
            "Metaflow finds no run with a model.",
            f"Train one with finetune run, or name a run, a folder or a model. {ADVICE}",
        )
    newest = max(tasks, key=lambda task: task.created_at)
    return _of_run(Run("/".join(newest.pathspec.split("/")[:2])))


def _newest_export(flow: str) -> Any | None:
    """Return the newest task that has exported a model; None if there is none."""
    try:
        return next(ended_tasks(runs_of(flow), _EXPORT, ["model_path"]), None)
    except NeverRunError:
        return None


@contextmanager
def _all_namespaces() -> Iterator[None]:
    """Make the runs of all users visible to Metaflow's client in this block."""
    try:
        previous = get_namespace()
    except MetaflowException:  # no user name in the environment
        previous = None
    namespace(None)
    try:
        yield
    finally:
        namespace(previous)


def _of_run(run: Any) -> FinishedModel:
    task = next(ended_tasks([run], _EXPORT, ["model_path"]), None)
    if task is None:
        raise UserError(
            f"Run {run.pathspec} has no model: its step {_EXPORT} has not finished.",
            f"Continue it with finetune flow resume --origin-run-id {run.id}, or name another run.",
        )
    folder = Path(task["model_path"].data)
    settings = task["used_settings"].data
    base: str = settings.model
    if not folder.is_dir():
        folder = _fetched(run.pathspec)
    return FinishedModel(
        name=finished.finetuned_name(base),
        folder=folder,
        base=base,
        settings=settings,
        run=run.pathspec,
        gpu=task["plan"].data.request.gpu_type,
    )


def _fetched(run: str) -> Path:
    """Download a run's model from the datastore, unless it is in this machine's cache."""
    folder = cache_folder() / "runs" / run.replace("/", "-")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fetch_model(run, folder)
    return finished.from_folder(folder).folder
