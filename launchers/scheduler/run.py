"""Complete run without Metaflow, on one node of a scheduler's job.

All nodes share the output folder::

    OUTPUT/model, adapter                               the finished model; only adapter for LLaMA-Adapters
    OUTPUT/plan.json, settings.yaml, metrics.json       inputs and measurements
    OUTPUT/run/                                         weights, data, checkpoints, logs of the ranks
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.plan import Counter, Plan
from estimator.terminal import print
from launchers import engines
from launchers.base.workdir import full_disk_explained
from launchers.cluster.allocation import Allocation
from launchers.cluster.endpoint import Secret
from launchers.dataset.prepared import Prepared
from launchers.evaluation.result import EvaluationResult
from launchers.gang.departure import Grace
from launchers.gang.job import TrainJob
from launchers.harness.result import HarnessResult
from launchers.harness.run import HarnessRequest
from launchers.report.metrics import summarize
from launchers.report.peak import MemoryPeak
from launchers.results import handover
from launchers.results.model_card import closing_facts, hub_page, write_records
from launchers.run import checks, stages
from launchers.run.export_best import VISIBLE_S
from launchers.run.replanning import plans_key
from launchers.run.stages import StageResult
from launchers.run.training import Attempt, TrainingResult, train
from launchers.scheduler.hosts import Host, Start, prepare_start
from launchers.scheduler.ownership import Ownership
from launchers.scheduler.rendezvous import join
from launchers.settings import Settings
from launchers.store.bundles import LocalStorage

RESUME_ADVICE = "Free some space there, then run the same command to resume."
AGAIN = "python -m launchers --settings settings.yaml --output FOLDER"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerRun:
    """Input of a run, the same on every node."""

    settings: Settings
    output: Path  # on a file system that all nodes share
    cache: Path | None = None  # shared folder of fetched models; None: below the output
    prepare_limit_s: float = 7200.0  # how long other nodes wait for plan, weights and data of node 0
    calibrated: bool = True  # whether to correct the plan with measurements of finished runs

    @property
    def folder(self) -> Path:
        """Folder of everything except the result."""
        return self.output / "run"

    def log_file(self, allocation: Allocation) -> Path:
        """Log of this node for one job of the scheduler; every attempt of the job appends to it."""
        return self.folder / "logs" / f"job-{allocation.job or 'none'}-node-{allocation.node}.log"


def run(request: SchedulerRun, allocation: Allocation, work: Path) -> None:
    """Run this node's part; returns when the run has succeeded on all nodes.

    Parameters
    ----------
    work:
        An empty folder on a local disk of this node.

    Raises
    ------
    UserError
        For anything the user can correct (nothing fits, bad data, a folder not shared by all); on all nodes.
    GangFailed
        If a rank or a node has failed; another attempt resumes from the newest checkpoint.
    SystemExit
        If stopped by a signal.
    """
    if allocation.node > 0:
        start = _follow(request, allocation, work)
        if start is not None:
            _train(request, allocation, start, work)
        return
    with contextlib.ExitStack() as owned:
        start = _lead(request, allocation, work, owned)
        if start is not None:
            trained = _train(request, allocation, start, work)
            with full_disk_explained(request.folder, RESUME_ADVICE):
                _export(request, allocation, start, trained, work)


def _lead(
    request: SchedulerRun, allocation: Allocation, work: Path, owned: contextlib.ExitStack
) -> Start | None:
    """On node 0: collect all hosts, plan, prepare, notify all; None if the model is finished already.

    From here until ``owned`` is closed, this job owns the output folder.
    """
    _create_shared_folder(request.folder, "--output")
    with full_disk_explained(request.folder, RESUME_ADVICE), join(allocation, request.folder) as rendezvous:
        if request.cache is not None:
            _create_shared_folder(request.cache, "--cache")
        facts = rendezvous.gather(_host(allocation, work).to_dict(), VISIBLE_S)
        owned.enter_context(Ownership(request.folder, allocation.job))
        if _is_finished(request, allocation):
            rendezvous.send({"start": ""})
            return None
        hosts = [Host.from_dict(values) for values in facts]
        start = prepare_start(
            request.settings, hosts, request.folder, cache=request.cache, calibrated=request.calibrated
        )
        name = f"start-{secrets.token_hex(8)}.json"
        (request.folder / name).touch(mode=0o600)
        (request.folder / name).write_text(start.to_json())
        rendezvous.send({"start": name})
        try:
            rendezvous.gather({}, VISIBLE_S + 60)
        finally:
            (request.folder / name).unlink()
        rendezvous.send({"start": True})
    return start


def _follow(request: SchedulerRun, allocation: Allocation, work: Path) -> Start | None:
    """On other nodes: report the hardware, wait for node 0, and verify that its files are visible here."""
    _create_shared_folder(request.folder, "--output")
    with join(allocation, request.folder) as rendezvous:
        rendezvous.send(_host(allocation, work).to_dict())
        name = str(rendezvous.receive(request.prepare_limit_s)["start"])
        if not name:
            return None
        file = request.folder / Path(name).name
        _wait_visible(file)
        start = Start.from_json(file.read_text())
        _wait_visible(start.model_dir / "config.json")
        _wait_visible(start.data_dir / "info.json")
        checks.check_installed(start.plan.engine, start.plan.method)
        rendezvous.send({"ready": True})
        rendezvous.receive(VISIBLE_S + 60)
    return start


def _train(request: SchedulerRun, allocation: Allocation, start: Start, work: Path) -> TrainingResult:
    job = TrainJob(
        plan=start.plan,
        settings=start.settings.model_copy(update={"output_dir": str(request.output)}),
        model=start.model,
        model_dir=start.model_dir,
        data_dir=start.data_dir,
        work_dir=work / "node",
        total_steps=Prepared(start.data_dir).info.total_steps,
        reward=start.reward,
    )
    attempt = Attempt(
        run=f"{request.output.name}-{allocation.job}",
        number=start.attempt,
        checkpoints=f"checkpoints/{start.key}",
        plans=plans_key(start.key),
        logs=f"logs/attempt-{start.attempt}/node-{allocation.node}",
        profile=f"profile/attempt-{start.attempt}/node-{allocation.node}",
    )
    # SIGUSR1 before the time limit (--signal), SIGTERM at pre-emption, and once more at the end of its grace
    seconds, signals = start.settings.resources.termination_grace_s, (signal.SIGUSR1, signal.SIGTERM)
    grace = Grace(seconds=seconds, signals=signals, sent_to_all=True)
    address, store = allocation.address(Secret(start.secret), "gang"), LocalStorage(request.folder)
    return train(job, attempt, address, store, work, grace=grace)


def _export(
    request: SchedulerRun, allocation: Allocation, start: Start, trained: TrainingResult, work: Path
) -> None:
    """On node 0: collect and evaluate the model, and move it to the output with its records, the model last.

    A model whose evaluation failed is exported too; metrics.json contains the reason.
    """
    plan, settings = trained.job.plan, trained.job.settings
    finished = request.folder / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    handover.collect(trained.job, finished)
    evaluated = _evaluate(start, plan, engines.result_of(finished), work / "evaluation")
    scored = _score_tasks(start, plan, engines.result_of(finished), work / "harness")
    summary = summarize(trained.metrics)
    facts = closing_facts(plan, summary, trained.memory_peak, evaluated.value, trained.exported)
    facts += scored.value.facts() if scored.value else []
    # The user's output_dir is recorded, as this node's absolute path would not repeat the run elsewhere
    recorded = settings.model_copy(update={"output_dir": request.settings.output_dir})
    write_records(finished, plan, recorded, facts, model=start.model, command=AGAIN)
    memory_predicted, memory_measured = _memory(plan, trained.memory_peak)
    values = {
        "job": allocation.job,
        "attempts": start.attempt + 1,
        "resumed_from": trained.resumed_from,
        "predicted": {**memory_predicted, "tokens_per_second": plan.prediction.tokens_per_second},
        "measured": {
            **memory_measured,
            "tokens_per_second": summary.tokens_per_second,
            "step_seconds": summary.step_seconds,
            "mfu": summary.mfu,
        },
        "windows": [window.to_dict() for window in trained.windows],
        "evaluation": evaluated.value.to_dict() if evaluated.value else None,
        "evaluation_failed": evaluated.error,
        "exported_step": trained.exported_step,
        "evaluations": [evaluation.to_dict() for evaluation in trained.evaluations],
        "harness": scored.value.to_dict() if scored.value else None,
        "harness_failed": scored.error,
        "steps": [metrics.to_dict() for metrics in trained.metrics],
    }
    (finished / "metrics.json").write_text(json.dumps(values, indent=1) + "\n")
    _publish(finished, request.output)
    for name in (f"data-{start.attempt}", "checkpoints", "plans"):
        shutil.rmtree(request.folder / name, ignore_errors=True)
    result = engines.result_of(request.output)
    pushed: StageResult[str] = StageResult()
    if settings.export.push:
        page = hub_page(request.output, plan, recorded, facts, model=start.model)
        pushed = stages.attempt(
            stages.PUSH, lambda: stages.push(request.output, page, settings, model_dir=result)
        )
    errors = {stages.EVALUATION: evaluated.error, stages.HARNESS: scored.error, stages.PUSH: pushed.error}
    lines = stages.closing_lines(facts, evaluated.value, result, url=pushed.value, errors=errors)
    print("\n".join(lines), flush=True)


def _memory(plan: Plan, peak: MemoryPeak | None) -> tuple[dict[str, object], dict[str, object]]:
    """Return predicted and measured memory of a process for metrics.json, by the same counter."""
    counter: Counter = "resident" if plan.layout.device == "cpu" else "reserved"
    counter = peak.counter if peak else counter
    predicted = plan.prediction.memory.counted(counter)
    return {
        "memory_bytes": predicted.likely_bytes if predicted else None,
        "memory_upper_bytes": predicted.upper_bytes if predicted else None,
        "memory_counter": counter,
    }, {"memory_peak_bytes": peak.size_bytes if peak else None, "memory_counter": counter}


def _score_tasks(start: Start, plan: Plan, model_dir: Path, work: Path) -> StageResult[HarnessResult]:
    """Score the models on harness tasks, if any are configured."""
    if not start.settings.harness.tasks:
        return StageResult()
    models = {"base": start.model_dir, "finetuned": model_dir}
    request = HarnessRequest(settings=start.settings, work_dir=work, models=models, device=plan.layout.device)
    return stages.attempt(stages.HARNESS, lambda: stages.score_tasks(request))


def _evaluate(start: Start, plan: Plan, model_dir: Path, work: Path) -> StageResult[EvaluationResult]:
    """Evaluate the models, unless nothing was held out and no answers are requested."""
    if not (start.data_dir / "heldout").exists() and not start.settings.evaluation.answers:
        return StageResult()
    return stages.attempt(
        stages.EVALUATION,
        lambda: stages.evaluate(
            start.settings,
            plan,
            base_dir=start.model_dir,
            model_dir=model_dir,
            data_dir=start.data_dir,
            work=work,
            reward=start.reward,
        ),
    )


def _publish(finished: Path, output: Path) -> None:
    """Move the result next to ``run``, the model last: a folder that contains it is finished."""
    last = engines.result_of(finished)
    for path in sorted(finished.iterdir(), key=lambda path: path == last):
        destination = output / path.name
        if destination.is_dir():
            shutil.rmtree(destination)
        path.replace(destination)
    finished.rmdir()


def _is_finished(request: SchedulerRun, allocation: Allocation) -> bool:
    """Whether this job has finished before; UserError if another job has."""
    try:
        job = str(json.loads((request.output / "metrics.json").read_text())["job"])
    except (OSError, ValueError, KeyError):
        job = ""
    if not engines.result_of(request.output).exists():
        return False
    if job == allocation.job:
        print(f"{request.output} already contains this job's finished model: nothing to do.", flush=True)
        return True
    raise UserError(
        f"{request.output} already contains a finished model{f' of job {job}' if job else ''}.",
        "Use another --output, or move that model away.",
    )


def _host(allocation: Allocation, work: Path) -> Host:
    machine = local_machine.detect(work)
    if (
        allocation.memory_bytes is not None
    ):  # limit of the job's control group, which local_machine does not see
        machine = replace(machine, ram_bytes=min(machine.ram_bytes, allocation.memory_bytes))
    return Host(name=socket.gethostname(), machine=machine)


def _wait_visible(path: Path) -> None:
    """Wait until a file that node 0 has written is visible on this node."""
    deadline = time.monotonic() + VISIBLE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"{path}, written by node 0 of the job, is not visible on {socket.gethostname()}.",
                "Use --output (and --cache, and a local model) on a file system that all nodes share.",
            )
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # makes NFS refresh its cache
        time.sleep(0.5)


def _create_shared_folder(folder: Path, option: str) -> None:
    """Create a folder and verify that it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written on {socket.gethostname()}: {error.strerror}.",
            f"Set {option} to a folder on a file system that all nodes share.",
        ) from None
