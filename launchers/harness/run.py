"""Execution of the tasks in a separate process: ``python -m launchers.harness.run request.json``.

Each model's scores are written to a file when complete, so a retry continues with the other model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from estimator.errors import UserError
from estimator.terminal import print
from launchers.base.imports import collector_paused
from launchers.base.request_process import PROBLEM, read_request, serve, write_request
from launchers.base.tokenizer import tokenizer_in
from launchers.cluster.processes import relevant_tail, started
from launchers.evaluation.loading import load_model, precision_on
from launchers.harness import tasks
from launchers.harness.result import HarnessResult, TaskScore, merged, scores_of
from launchers.settings import Settings

PROGRESS_INTERVAL_S = 10.0
MODELS = ("base", "finetuned")  # an adapter is applied to the base
_MAX_BATCH_SIZE = 64  # for batch_size auto; default of lm-evaluation-harness


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessRequest:
    """Input of a harness run; files and folders are on this machine."""

    settings: Settings  # its harness.tasks are names, and local files and folders
    work_dir: Path  # receives request.json, request.log, and NAME.json for each model
    models: dict[str, Path] = field(default_factory=dict)  # by MODELS; empty: only load and try the tasks
    device: Literal["cuda", "cpu"] = "cpu"

    def file_of(self, name: str) -> Path:
        """Return the file of a model's scores, which exists once they are complete."""
        return self.work_dir / f"{name}.json"


def try_tasks(settings: Settings, work: Path) -> None:
    """Load the tasks with their data, and build each task's first question, so that errors occur early.

    Raises UserError.
    """
    if settings.harness.tasks:
        tasks.check(settings)
        tasks.check_installed(settings)
        _run(HarnessRequest(settings=settings, work_dir=work), lambda _: None)


def run_tasks(request: HarnessRequest, on_model: Callable[[Path], None] = lambda _: None) -> HarnessResult:
    """Score both models; models with a score file in the work folder are not scored again.

    ``on_model`` is called with each complete file. Raises UserError for user errors and an exceeded time
    limit, RuntimeError if the process failed otherwise.
    """
    _run(request, on_model)
    results = [json.loads(request.file_of(name).read_text()) for name in MODELS]
    base, finetuned = ([TaskScore(**row) for row in values["scores"]] for values in results)
    settings = request.settings.harness
    return HarnessResult(
        rows=merged(base, finetuned),
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        chat=settings.chat,
        version=results[-1]["version"],
    )


def _run(request: HarnessRequest, on_model: Callable[[Path], None]) -> None:
    path, log = write_request(request.work_dir / "request.json", request), request.work_dir / "request.log"
    problem = path.with_name(PROBLEM)
    problem.unlink(missing_ok=True)
    missing = [file for name in request.models if not (file := request.file_of(name)).is_file()]
    if request.models and not missing:
        return
    limit_s = 60.0 * request.settings.harness.timeout_minutes
    started_at = reported_at = time.monotonic()
    status = None
    with started(
        "launchers.harness.run", path, log, on_cpu=request.device == "cpu", offline=False
    ) as process:
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.5)
            for file in [file for file in missing if file.is_file()]:
                on_model(file)
                missing.remove(file)
            now = time.monotonic()
            if status is None and now - reported_at >= PROGRESS_INTERVAL_S:
                print(f"harness: {now - started_at:.0f} s, {_last_progress(log)}", flush=True)
                reported_at = now
            if status is None and now - started_at > limit_s:
                raise UserError(
                    f"lm-evaluation-harness did not end within {request.settings.harness.timeout_minutes} "
                    "minutes.",
                    "Score fewer rows (harness.limit), or raise harness.timeout_minutes.",
                )
    if problem.is_file():
        raise UserError(**json.loads(problem.read_text()))
    if status != 0 or missing:
        raise RuntimeError(f"lm-evaluation-harness failed (status {status}). {relevant_tail(log, 30)}")


def _last_progress(log: Path) -> str:
    """Return the log's last progress line: of this package, or a progress bar."""
    lines = reversed(relevant_tail(log, 10).split("\n"))
    return next((line.strip() for line in lines if "%|" in line or line.startswith("loading")), "starting")


def main(path: Path) -> None:
    """Score the models without a score file, in this process."""
    request = read_request(HarnessRequest, path)
    if all(tasks.is_file(task) for task in request.settings.harness.tasks):
        # The cache of datasets for the user's local files is useless afterwards
        os.environ["HF_DATASETS_CACHE"] = str(request.work_dir / "datasets")
    print("loading the tasks", flush=True)
    loaded = _load(request.settings.harness.tasks)
    for name in request.models:
        file = request.file_of(name)
        if not file.is_file():
            print(f"loading the model: {name}", flush=True)
            scores, version = _score(request, name, loaded)
            values = {"scores": [dataclasses.asdict(score) for score in scores], "version": version}
            file.with_suffix(".tmp").write_text(json.dumps(values))
            file.with_suffix(".tmp").rename(file)


def _load(names: tuple[str, ...]) -> list[Any]:
    """Load the harness's tasks and groups with their data, in the order of the settings."""
    with collector_paused():
        from lm_eval.tasks import TaskManager

    user_manager, default_manager = TaskManager(include_defaults=False), None
    loaded: list[Any] = []
    for name in names:
        if tasks.is_file(name):
            for file in tasks.yaml_files(Path(name).expanduser().resolve()):
                with _in_folder(file.parent), _explained(str(file)):
                    loaded += _try_first_rows(user_manager.load([file.name]))
        else:
            default_manager = default_manager or TaskManager()
            with _explained(name):
                loaded += _try_first_rows(default_manager.load([name]))
    return loaded


def _try_first_rows(loaded: Any) -> list[Any]:
    """Build each task's first question; return the loaded groups, and the tasks outside of groups."""
    for task in loaded["tasks"].values():
        row = next(iter(task.eval_docs))
        task.doc_to_text(row)
        task.doc_to_target(row)
        if task.OUTPUT_TYPE == "multiple_choice":
            task.doc_to_choice(row)
    groups = loaded.get("groups", {})
    inner = {name for children in loaded.get("group_map", {}).values() for name in children}
    return [candidate for name, candidate in (groups | loaded["tasks"]).items() if name not in inner]


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    previous = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous)


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
    """Translate exceptions of a task's code to UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a task's code may raise anything
        traceback.print_exc()  # into the log
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        offline = isinstance(error, OSError)  # includes ConnectionError and errors of the Hub's client
        advice = "Check that the Hugging Face Hub, which has its data, is reachable." if offline else ""
        raise UserError(
            f"Task {task} cannot be loaded: {problem}", advice or "Fix it, or remove it from harness.tasks."
        ) from None


def _score(request: HarnessRequest, name: str, loaded: list[Any]) -> tuple[list[TaskScore], str]:
    """Return a model's scores, and the harness's version."""
    with collector_paused():
        import lm_eval
        import torch
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

    settings, harness = request.settings, request.settings.harness
    precision = precision_on(request.device)
    model = HFLM(
        pretrained=load_model(
            request.models[name],
            request.models["base"],
            request.device,
            precision,
            settings,
            trust_remote_code=settings.trust_remote_code,
        ),
        # both models use the finished model's tokenizer, as in launchers.evaluation.evaluate
        tokenizer=tokenizer_in(request.models["finetuned"], trust_remote_code=settings.trust_remote_code),
        backend="causal",
        batch_size=harness.batch_size,
        max_batch_size=_MAX_BATCH_SIZE,
    )
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=loaded,
        num_fewshot=harness.num_fewshot,
        limit=harness.limit,
        apply_chat_template=harness.chat,
        log_samples=False,
        task_manager=TaskManager(include_defaults=False),  # the tasks are loaded already
    )
    del model
    if request.device == "cuda":
        torch.cuda.empty_cache()
    return scores_of(results), lm_eval.__version__


if __name__ == "__main__":
    serve(main)
