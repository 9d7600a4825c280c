"""Tasks of lm-evaluation-harness in a run: transport of their files to the steps, and scoring."""

from __future__ import annotations

from pathlib import Path

from decorators.storage import datastore
from estimator.plan import Plan
from flows.finetune import artifacts
from launchers import engines
from launchers.engines.reward_head import as_trained
from launchers.harness import tasks
from launchers.harness.result import HarnessResult
from launchers.harness.run import MODELS, HarnessRequest
from launchers.run import stages
from launchers.settings import Settings
from launchers.store.bundles import get_bundle


def stage_tasks(settings: Settings) -> dict[str, str]:
    """Store the files of the user's tasks in the datastore; return their keys by the user's task names."""
    user_tasks = [task for task in settings.harness.tasks if tasks.is_file(task)]
    if not user_tasks:
        return {}
    store = datastore(shared=True)
    return {task: artifacts.stage_files(store, tasks.portable(task)) for task in user_tasks}


def fetch_tasks(settings: Settings, folder: Path) -> Settings:
    """Return the settings with the tasks' files on this machine, downloaded if the launch stored them."""
    paths = []
    for number, task in enumerate(settings.harness.tasks):
        key, target = artifacts.staged_key(task), folder / str(number)
        if key is not None:
            get_bundle(datastore(shared=True), key, target)
            target = target / Path(task).name if task.endswith(tasks.SUFFIXES) else target
        paths.append(task if key is None else str(target))
    harness = settings.harness.model_copy(update={"tasks": tuple(paths)})
    return settings.model_copy(update={"harness": harness})


def run_tasks(settings: Settings, plan: Plan, *, base: str, finished: str, work_dir: Path) -> HarnessResult:
    """Score base and finished model, except models that an earlier attempt has scored.

    ``base`` names the weights (:func:`finetune_artifacts.fetch_weights_once`), ``finished`` is the key of the
    finished model's bundle.
    """
    store, prefix = datastore(), f"harness/{finished}"
    request = HarnessRequest(
        settings=fetch_tasks(settings, work_dir / "tasks"),
        work_dir=work_dir / "scores",
        models={
            "base": as_trained(artifacts.fetch_model(base, work_dir / "base"), settings, work_dir),
            "finetuned": _finished_model(finished, work_dir / "finished"),
        },
        device=plan.layout.device,
    )
    request.work_dir.mkdir(parents=True)
    for file in map(request.file_of, MODELS):
        if store.size(f"{prefix}/{file.name}") is not None:
            store.get_file(f"{prefix}/{file.name}", file)
    return stages.score_tasks(request, lambda file: store.put_file(f"{prefix}/{file.name}", file))


def _finished_model(key: str, folder: Path) -> Path:
    get_bundle(datastore(), key, folder)
    return engines.result_of(folder)
