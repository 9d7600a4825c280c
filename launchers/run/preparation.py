"""Preparation of a run: resolve the model, plan, read and tokenize the data.

The flow and ``python -m launchers`` call the same functions, with different arguments for the destination of
the run (``Target``), the choice among plans, and the download of data.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from estimator import calibration, models
from estimator.calibration import Calibration
from estimator.errors import UserError
from estimator.formatting import format_count, format_parameters
from estimator.job import Job, Target
from estimator.models import DiffusionSpec, ModelRef, ModelSource, ModelSpec, untried
from estimator.option_names import option_name
from estimator.plan import Plan
from estimator.terminal import print
from estimator.vocabulary import TASKS
from launchers import run_config
from launchers.dataset import mixture, preferences, prompts, rows, sources, stored, texts
from launchers.dataset.preferences import Sample
from launchers.dataset.prepared import Prepared, PreparedInfo
from launchers.dataset.stored import StoredRows
from launchers.engines._schedule import warmup_steps
from launchers.harness import tasks
from launchers.images import attached, pictures, runs
from launchers.models import own_code, weights
from launchers.models.files import tensor_shapes
from launchers.models.fit import check_fits
from launchers.report.metrics import tokens_of_steps
from launchers.run import checks
from launchers.run.job import build_job
from launchers.run_config import RunConfig
from launchers.settings import Settings

_log = logging.getLogger(__name__)

ChoosePlan = Callable[[Job, Target, Calibration | None], Plan]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A resolved and planned run, before anything large is fetched or started."""

    model: ModelRef
    settings: RunConfig
    plan: Plan


def best_plan(job: Job, target: Target, corrections: Calibration | None) -> Plan:
    """Return the planner's first choice."""
    from estimator.planning import planner  # slow to import, and tasks of a run do not plan

    return planner.plan(job, target, calibration=corrections)


def plan_run(
    settings: Settings, target: Target, *, calibrated: bool = True, choose: ChoosePlan = best_plan
) -> PlannedRun:
    """Resolve the model, check the settings and plan the run; only small files are fetched.

    Parameters
    ----------
    target:
        Destination of the run; nodes and GPUs in the settings take precedence.
    calibrated:
        Whether to correct the plan with the measurements of finished runs.
    choose:
        Function that chooses among the plans of a job.

    Raises
    ------
    UserError
        For anything the user can correct; CannotFit, a subclass, if no available machine fits.
    """
    model = models.resolve(settings.model, online=True)
    settings = with_vision(run_config.apply_defaults(settings, model.spec), model.spec)
    checks.check_supported(settings, model.spec)
    runs.check(settings)
    _check_files(settings, model)
    checks.check_reward(settings, settings.sequence_length(model.spec))
    tasks.check(settings)
    rows = count_rows(settings)
    settings = settings.limit_batch(rows)
    steps = count_steps(settings, model.spec, rows)
    if steps is not None and settings.tokens is None:  # of a token budget, ``steps`` is only a lower bound
        checks.check_evaluations(settings, steps)
    job, run_target = (
        build_job(settings, model.spec, steps, installed=target.hardware_given),
        apply_resources(settings, target),
    )
    corrections = load_corrections() if calibrated else None
    plan = choose(job, run_target, corrections)
    batch = plan.layout.global_batch_size
    if batch != settings.batch_size:  # the planner changed the default batch, and so the number of steps
        steps = count_steps(settings.model_copy(update={"global_batch_size": batch}), model.spec, rows)
        job = dataclasses.replace(job, global_batch_size=batch, steps=steps)
        plan = choose(job, run_target, corrections)
    config = run_config.resolve(
        settings,
        model.spec,
        method=plan.method,
        engine=plan.engine,
        batch=plan.layout.global_batch_size,
        plan=plan,
    )
    _log.info("Engine %s (requested: %s), method %s", config.engine, settings.engine, config.method)
    checks.check_layout(config, plan, model.spec)
    return PlannedRun(model=model, settings=config, plan=plan)


def with_vision(settings: Settings, spec: ModelSpec) -> Settings:
    """Resolve an empty ``vision``: frozen if a local dataset starts with images and the model sees them."""
    if settings.vision is not None or settings.task != "sft" or not spec.sees_images:
        return settings
    paths = [Path(sources.split_of(name)[0]).expanduser() for name in mixture.names(settings)]
    local = [name for name, path in zip(mixture.names(settings), paths, strict=True) if path.exists()]
    if not any(attached.has_images(sources.local_path(name), settings.columns) for name in local):
        return settings
    return settings.model_copy(update={"vision": "frozen"})


def load_corrections() -> Calibration | None:
    """Load the measurements of finished runs; unreadable lines are reported on standard error."""
    corrections, problems = calibration.load()
    for line in problems:
        print(line, file=sys.stderr)
    return corrections


def _check_files(settings: Settings, model: ModelRef) -> None:
    """Raise UserError if a local model folder or held-out file is unusable."""
    if model.kind == "folder":
        weights.check_model_folder(Path(model.location))
        own_code.check_model(Path(model.location), trust_remote_code=settings.trust_remote_code)
    if settings.evaluation.dataset and sources.kind_of(settings.evaluation.dataset) == "path":
        for _ in read_samples(settings, sources.local_path(settings.evaluation.dataset)):
            pass


def check_matches(plan: Plan | None, settings: Settings, spec: ModelSpec) -> Plan:
    """Return ``plan``, with which the run was launched; raise UserError if the settings contradict it.

    A setting that is left to the planner (empty or ``auto``) matches every plan. ``spec``: specification of
    the model.
    """
    if plan is None:
        raise UserError("This run has no plan.", "Start it with `run`, or redeploy the flow.")
    for name, requested, planned in _differences(plan, settings, spec):
        option = option_name(name)
        value = f"the default {option}" if planned is None else f"{option} {planned}"
        raise UserError(
            f"This deployment was planned with {value}; the run requests {requested or 'the default'}.",
            "Redeploy the flow with this value: a deployment's resources are fixed.",
        )
    return plan


def _differences(plan: Plan, settings: Settings, spec: ModelSpec) -> Iterator[tuple[str, object, object]]:
    """Iterate over (name, requested value, planned value) of settings that differ from the plan."""
    from estimator.planning.job_settings import changed_settings
    from estimator.planning.search import precision_of

    layout = plan.layout
    planned: dict[str, object] = {
        "method": plan.method,
        "engine": plan.engine,
        "global_batch_size": layout.global_batch_size,
        "micro_batch_size": layout.micro_batch_size,
        "activation_checkpointing": layout.activation_checkpointing,
        "precision": layout.precision,
        "packing": plan.packing,
        "liger": plan.liger,
        "compile": plan.compile,
    }
    requested = {name: getattr(settings, name) for name in planned}
    for name, value in planned.items():
        if requested[name] not in (None, "auto", value) and name != "precision":
            yield name, requested[name], value
    config = run_config.resolve(
        settings, spec, method=plan.method, engine=plan.engine, batch=layout.global_batch_size
    )
    without_reward = config.rl.model_copy(update={"reward": None})  # not fetched yet, and not compared
    job = build_job(config.model_copy(update={"rl": without_reward}), spec, None)
    if job.precision != "auto" and precision_of(job, layout.device, None) != layout.precision:
        yield "precision", job.precision, layout.precision
    requested_changes = {name: str(value) for name, value in changed_settings(job) if name not in planned}
    planned_changes = requested_changes if plan.settings is None else dict(plan.settings)
    for name in {**requested_changes, **planned_changes}:
        if name not in planned and requested_changes.get(name) != planned_changes.get(name):
            yield name, requested_changes.get(name), planned_changes.get(name)


def count_rows(settings: Settings) -> int | None:
    """Count the training rows of local data; None if unknown. Raises UserError for malformed data.

    Rows of plain text are known only after tokenization, batches of images only after bucketing.
    """
    names = mixture.names(settings)
    counts = [
        sum(1 for _ in read_samples(settings, sources.fetch(name, Path())))
        for name in names
        if sources.kind_of(name) == "path"
    ]
    if len(counts) < len(names) or settings.task == "pretrain" or TASKS[settings.task].images:
        return None
    import numpy as np  # imported here: the flow's other processes do not need it

    from launchers.dataset import prepare

    held_out = prepare.held_out_rows(sum(counts), settings)
    origins = np.delete(np.repeat(np.arange(len(counts)), counts), held_out)
    return len(mixture.weighted_indices(origins, settings))


def count_steps(settings: Settings, spec: ModelSpec, rows: int | None) -> int | None:
    """Return the number of optimizer steps on ``rows`` dataset rows; None if unknown.

    For a token budget, it is a lower bound: all sequences are assumed to be full. Raises UserError for fewer
    rows than one batch.
    """
    if settings.tokens is not None:  # the planner too counts full sequences
        sequences = settings.batch_size * (2 if settings.trains_on_pairs else 1)
        return -(-settings.tokens // (sequences * settings.sequence_length(spec)))
    if rows is None:
        return settings.max_steps
    from launchers.dataset import prepare

    prepare.check_batch(
        rows, "pairs to train on" if settings.trains_on_pairs else "rows to train on", settings
    )
    return settings.steps_of(rows)


def apply_resources(settings: Settings, target: Target) -> Target:
    """Overlay ``target`` with the nodes and GPUs that the settings request."""
    resources = settings.resources
    return dataclasses.replace(
        target,
        nodes=resources.nodes if resources.nodes is not None else target.nodes,
        gpus=resources.gpus,
        gpu=resources.gpu,
        instance_type=resources.instance_type,
        cloud=resources.cloud,
        device=resources.device,
        capacity=resources.capacity,
        tight=resources.tight,
    )


def summarize_plan(plan: Plan) -> str:
    """Summarize the plan in one line for the log of a task."""
    layout, memory = plan.layout, plan.prediction.memory
    machine = f"{plan.request.gpus_per_node}x {plan.request.gpu_type}" if plan.request.gpu_type else "CPU"
    return (
        f"plan: {plan.model}, {plan.method} with {plan.engine}, "
        f"{format_count(layout.nodes, 'node')} of {machine}, {layout.sharding}, "
        f"micro batch {layout.micro_batch_size} x {layout.accumulation}, "
        f"memory of a process {memory.describe()}"
    )


def read_data(
    settings: Settings, folder: Path, *, fetch: Callable[[str, Path], Path] = sources.fetch
) -> tuple[StoredRows, StoredRows | None]:
    """Read, check and store the training rows and separate held-out rows in ``folder``/rows.

    ``fetch(name, folder)`` downloads a dataset into a folder and returns the file's path.
    """
    # An earlier attempt with other settings may have left rows
    shutil.rmtree(folder / "rows", ignore_errors=True)
    with stored.Writer(folder / "rows" / "train") as writer:
        for number, name in enumerate(mixture.names(settings)):
            path = fetch(name, folder / (f"mixture-{number}" if number else "dataset"))
            count_before = len(writer)
            for sample in _samples_of(settings, name, path):
                writer.add(sample.with_source(number) if number else sample)
            print(f"{name}: {len(writer) - count_before:,} rows, all well-formed", flush=True)
    if settings.evaluation.dataset:
        with stored.Writer(folder / "rows" / "held-out") as writer:
            path = fetch(settings.evaluation.dataset, folder / "held_out")
            for sample in _samples_of(settings, settings.evaluation.dataset, path):
                writer.add(sample)
    return open_stored_rows(folder / "rows")


def open_stored_rows(folder: Path) -> tuple[StoredRows, StoredRows | None]:
    """Open training and held-out rows in the folder written by :func:`read_data`."""
    held_out = folder / "held-out"
    return StoredRows(folder / "train"), StoredRows(held_out) if held_out.is_dir() else None


def read_samples(settings: Settings, path: Path, *, fetches: bool = False) -> Iterator[Sample]:
    """Iterate over a file's rows, parsed for the task: conversations, pairs, judged answers, prompts, texts.

    ``fetches``: download images that rows refer to by URL; otherwise these images are not read. Raises
    UserError before the first row (unusable file) or after the last one (list of invalid rows).
    """
    columns = settings.columns
    if settings.task == "pretrain":
        return texts.read(path, columns)
    if TASKS[settings.task].images:
        return pictures.read(path, min_side=runs.min_side(settings), columns=columns)
    if texts.is_text_file(path):
        raise UserError(
            f"Dataset {path} is plain text, which task {settings.task} does not support.",
            "Use --task pretrain, or a JSONL dataset.",
        )
    if TASKS[settings.task].judged:
        return preferences.read_judged(path, columns)
    if TASKS[settings.task].draws_answers:
        return prompts.read(path, columns)
    if settings.trains_on_pairs:
        return preferences.read(path, columns)
    images = None
    if settings.vision is not None:
        images = attached.Reader(folder=path if path.is_dir() else path.parent, fetches=fetches)
    return rows.read(path, columns, images)


def _samples_of(settings: Settings, name: str, path: Path) -> Iterator[Sample]:
    """Iterate over a dataset's rows, parsed for the task; chats of built-in datasets are converted."""
    if sources.kind_of(name) != "built-in" or TASKS[settings.task].images:
        return read_samples(settings, path, fetches=True)
    chats = rows.read(path)
    if settings.task == "pretrain":
        return texts.from_conversations(chats)
    if TASKS[settings.task].judged:
        return preferences.judged_from_pairs(preferences.from_conversations(chats))
    return preferences.from_conversations(chats) if settings.trains_on_pairs else chats


def fetch_weights(
    model: ModelSource,
    folder: Path,
    *,
    rewards: bool = False,
    vision: bool = False,
    trust_remote_code: bool = False,
    runs_code: bool = True,
) -> Path:
    """Fetch all files of a model to this machine, and check that they match its config.json.

    The check needs transformers, and is omitted without it. See :func:`launchers.models.weights.fetch`.

    Parameters
    ----------
    rewards:
        Whether the model is a reward model.
    vision:
        Whether to keep the vision tower of a multimodal model.
    trust_remote_code:
        Whether the model may need Python code of its folder.
    runs_code:
        Whether this process may run that code: True in tasks of a run, False where a run is launched. If
        False, a model that needs its code is not compared with config.json.
    """
    path = weights.fetch(model, folder, vision=vision)
    is_pipeline = isinstance(model, ModelRef) and isinstance(model.spec, DiffusionSpec)
    if model.kind != "made" and not is_pipeline:
        own_code.check_model(path, trust_remote_code=trust_remote_code)
        has_transformers = importlib.util.find_spec("transformers") is not None
        if has_transformers and (runs_code or not own_code.needs_code(path)):
            check_fits(path, rewards=rewards, trust_remote_code=trust_remote_code)
    if isinstance(model, ModelRef) and (model.spec.own_code or untried.is_untried(model.spec.family)):
        parameters = sum(map(math.prod, tensor_shapes(path).values()))
        print(
            f"{model.name}: {format_parameters(parameters)} in its files; the plan counted "
            f"{format_parameters(model.spec.parameters)} (untested model family)",
            flush=True,
        )
    return path


def tokenize(
    samples: Sequence[Sample],
    held_out: Sequence[Sample] | None,
    settings: RunConfig,
    model_dir: Path,
    folder: Path,
) -> PreparedInfo:
    """Tokenize the rows into ``folder``, which all ranks read, and print a summary and a sample row.

    ``held_out``: rows of a separate held-out dataset; None: hold out a part of ``samples``. ``model_dir``
    needs only the configuration and the tokenizer.
    """
    if TASKS[settings.task].images:
        info = runs.prepare(samples, held_out, settings, folder)
        _warn_short_run(settings, info.total_steps)
        return info
    print(f"tokenizing {len(samples):,} rows with the tokenizer of {settings.model}", flush=True)
    from launchers.dataset import prepare, render

    if any(getattr(sample, "text", None) is None for sample in samples):
        render.check_template(model_dir, settings)
    train, split_off = prepare.split(samples, settings)
    if settings.mixture:
        train = mixture.weighted(train, settings)
        print(mixture.summary(train, settings))
    info = prepare.prepare(
        train,
        model_dir,
        settings,
        settings.seq_len,
        folder,
        held_out or split_off,
        min_packed_steps=settings.min_packed_steps,
    )
    print(prepare.summary(info, " + ".join(mixture.names(settings))))
    _warn_short_run(settings, info.total_steps)
    checks.check_window(settings, info.total_steps)
    checks.check_evaluations(settings, info.total_steps)
    if settings.evaluation.in_training and not (folder / "heldout").is_dir():
        raise UserError(
            "evaluation.every_steps: no rows are held out for evaluation during training.",
            "Set evaluation.dataset, or provide more rows.",
        )
    if settings.tokens is not None:
        trained_tokens = sum(tokens_of_steps(Prepared(folder)))
        print(
            f"token budget of {settings.tokens:,}: {info.total_steps:,} steps, {trained_tokens:,} tokens, "
            f"{trained_tokens / info.tokens:.2f} epochs of the data"
        )
    tokenizer = render.load_tokenizer(model_dir, settings)
    print(prepare.format_sample(Prepared(folder), tokenizer), flush=True)
    return info


def short_run_warning(settings: Settings, total_steps: int) -> str | None:
    """Return a warning if the run ends before the warm-up does; None otherwise."""
    warmup = warmup_steps(settings.schedule, total_steps)
    if total_steps > warmup:
        return None
    if total_steps == 1:
        return (  # the first step of a warm-up has learning rate 0
            "WARNING: the run has one step, and the warm-up starts at learning rate 0: nothing is learned; "
            "add rows or epochs, or set schedule.warmup_steps 0"
        )
    return (
        f"WARNING: the warm-up takes {warmup:,} steps, the run {total_steps:,}: the learning rate does not "
        "reach its peak"
    )


def _warn_short_run(settings: Settings, total_steps: int) -> None:
    warning = short_run_warning(settings, total_steps)
    if warning is not None:
        print(warning)
