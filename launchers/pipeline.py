"""One run, step by step, for every way in: settings -> model -> plan -> data -> evaluation.

The flow and ``python -m launchers`` call the same functions. What differs between them is given in: where the
run is to go (``Target``), who chooses among plans, how data is fetched, and how options are spelled
(:func:`estimator.errors.spelled_as`).
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
from typing import Any

from estimator import calibration, models
from estimator.calibration import Calibration
from estimator.errors import Change, UserError
from estimator.job import Job, Target
from estimator.models import DiffusionSpec, ModelRef, ModelSource, ModelSpec, untried
from estimator.plan import Plan
from estimator.planning import planner
from estimator.vocabulary import TASKS, RequestedEngine
from launchers import checks, image_runs, run_config
from launchers.dataset import mixture, preferences, prompts, rows, sources, stored, texts
from launchers.dataset.measured import MAX_ROWS
from launchers.dataset.preferences import Sample
from launchers.dataset.prepared import Prepared, PreparedInfo
from launchers.dataset.stored import StoredRows
from launchers.engines._schedule import warmup_steps
from launchers.harness import tasks
from launchers.images import pictures
from launchers.models import weights
from launchers.models.files import tensor_shapes
from launchers.models.fit import check_fits
from launchers.report.metrics import tokens_of_steps
from launchers.run_config import RunConfig
from launchers.scoring.functions import scorer_of
from launchers.settings import Settings

_log = logging.getLogger(__name__)

ChoosePlan = Callable[[Job, Target, Calibration | None], Plan]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run as it was resolved and planned, before anything is fetched or started."""

    model: ModelRef
    settings: RunConfig
    plan: Plan


def best_plan(job: Job, target: Target, corrections: Calibration | None) -> Plan:
    """The planner's first choice, and nothing else."""
    return planner.plan(job, target, calibration=corrections)


def plan_run(
    settings: Settings, target: Target, *, calibrated: bool = True, choose: ChoosePlan = best_plan
) -> PlannedRun:
    """Look up the model, check what is asked for, and plan it; nothing is fetched but small files.

    Parameters
    ----------
    target:
        Where the run is to go; what the settings ask for of nodes and GPUs is laid over it.
    calibrated:
        Whether what finished runs have measured corrects the plan.
    choose:
        Makes the plan of a job.

    Raises
    ------
    UserError
        For anything that the user can mend; CannotFit, which is one, where nothing at hand will do.
    """
    model = models.resolve(settings.model, online=True)
    settings = run_config.apply_defaults(settings, model.spec)
    checks.check_supported(settings, model.spec)
    image_runs.check(settings)
    _check_files(settings, model)
    checks.check_reward(settings, settings.sequence_length(model.spec))
    tasks.check(settings)
    steps = count_steps(settings, model.spec)
    if steps is not None and settings.tokens is None:  # which are reached with so many steps at the least
        checks.check_evaluations(settings, steps)
    job = build_job(settings, model.spec, steps)
    plan = choose(job, apply_resources(settings, target), load_corrections() if calibrated else None)
    config = run_config.resolve(settings, model.spec, method=plan.method, engine=plan.engine)
    _log.info("Engine %s (requested: %s), method %s", config.engine, settings.engine, config.method)
    checks.check_layout(config, plan, model.spec)
    return PlannedRun(model=model, settings=config, plan=plan)


def load_corrections() -> Calibration | None:
    """What finished runs have measured here; lines that can't be read are named on standard error."""
    corrections, problems = calibration.load()
    for line in problems:
        print(line, file=sys.stderr)
    return corrections


def _check_files(settings: Settings, model: ModelRef) -> None:
    """Raise UserError where a local model folder or held-out file can't be used."""
    if model.kind == "folder":
        weights.check_whole(Path(model.location))
    if settings.evaluation.dataset and sources.kind_of(settings.evaluation.dataset) == "path":
        for _ in read_samples(settings, sources.local(settings.evaluation.dataset)):
            pass


def check_matches(plan: Plan | None, settings: Settings) -> Plan:
    """The plan that a run was launched with; UserError where the settings are of another job."""
    if plan is None:
        raise UserError("This run has no plan.", "Start it with `run`, or deploy the flow anew.")
    planned = (plan.model, plan.method, plan.engine)
    asked = (settings.model, settings.method, settings.engine)
    differs = any(a not in ("auto", p) for a, p in zip(asked[1:], planned[1:], strict=True))
    if differs or plan.layout.global_batch_size != settings.global_batch_size:
        raise UserError(
            f"This deployment was planned for {planned}, batch {plan.layout.global_batch_size}; "
            f"the run asks for {asked}, batch {settings.global_batch_size}.",
            "Deploy the flow anew with these values: a deployment's resources are fixed.",
        )
    return plan


def count_steps(settings: Settings, spec: ModelSpec) -> int | None:
    """Optimizer steps, where the data is at hand already; broken data and too little of it are refused.

    Of a budget of tokens: as many steps as it would be with full sequences.
    """
    names = mixture.names(settings)
    counts = [
        sum(1 for _ in read_samples(settings, sources.fetch(name, Path())))
        for name in names
        if sources.kind_of(name) == "path"
    ]
    if settings.tokens is not None:  # as the planner counts a step's tokens: full sequences
        sequences = settings.global_batch_size * (2 if settings.trains_on_pairs else 1)
        return -(-settings.tokens // (sequences * settings.sequence_length(spec)))
    if len(counts) < len(names) or settings.task == "pretrain":  # which is rows only when it is tokens
        return settings.max_steps
    if TASKS[settings.task].images:  # whose batches depend on the images' sizes: `prepare` counts them
        return settings.max_steps
    import numpy as np  # which the flow's other processes do without

    from launchers.dataset import prepare

    held_out = prepare.held_out_rows(sum(counts), settings)
    origins = np.delete(np.repeat(np.arange(len(counts)), counts), held_out)
    rows = len(mixture.weighted_places(origins, settings))
    prepare.check_batch(
        rows, "pairs to train on" if settings.trains_on_pairs else "rows to train on", settings
    )
    steps = rows * settings.epochs // settings.rows_per_step
    return min(steps, settings.max_steps or steps)


def build_job(settings: Settings, spec: ModelSpec, steps: int | None) -> Job:
    """What is to be trained, as the planner takes it."""
    checkpointing = settings.activation_checkpointing
    stage = settings.zero.stage
    seq_len = settings.sequence_length(spec)
    engine: RequestedEngine = settings.engine
    if engine == "auto" and settings.method != "auto":  # for method auto the planner chooses both
        engine = checks.able_engine(settings, spec)
    return Job(
        model=_changed(spec, settings),
        method=settings.method,
        engine=engine,
        task=settings.task,
        seq_len=seq_len,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size,
        optimizer=settings.optimizer.name,
        optimizer_in_backward=settings.optimizer.in_backward,
        precision=settings.precision,
        fp8=settings.fp8,
        average=settings.images.ema_decay is not None,
        activation_checkpointing=None if checkpointing == "auto" else checkpointing,
        recompute=settings.recompute.what,
        recompute_every=settings.recompute.every,
        lora_rank=settings.lora.rank,
        lora_targets=spec.all_linear if settings.lora.all_linear else tuple(settings.lora.targets),
        rslora=settings.lora.rslora,
        lora_experts=settings.lora.experts,
        quantization=settings.lora.quantization,
        trained_modules=settings.trained_modules,
        new_tokens=len(settings.new_tokens),
        adapter_prompt_length=settings.adapter.prompt_length,
        adapter_start_layer=settings.adapter.start_layer,
        packing=settings.packing,
        longest_first=settings.longest_first,
        expandable_segments=settings.expandable_segments,
        compile=settings.compile,
        liger=settings.liger,
        zero_stage=None if stage == "auto" else stage,
        fsdp_sharding=None if settings.fsdp.sharding == "auto" else settings.fsdp.sharding,
        replicas=None if settings.fsdp.replicas == "auto" else settings.fsdp.replicas,
        offload="cpu" if "cpu" in (settings.zero.offload, settings.fsdp.offload) else "none",
        steps=steps,
        evaluated_sequences=_evaluated_sequences(settings, steps),
        adapter_only=settings.export.adapter_only,
        **_drawing(settings, seq_len),
    )


def _changed(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """The model as these settings train it."""
    if isinstance(spec, DiffusionSpec):
        return spec.with_trained_texts() if settings.images.text_encoders else spec
    return spec.with_tokens(len(settings.new_tokens))


def _evaluated_sequences(settings: Settings, steps: int | None) -> int:
    """Held-out sequences that go through the model while it trains, at most.

    0 where that isn't known before: of evaluations by minutes, or in a run of unknown length.
    """
    every = settings.evaluation.every_steps
    if every is None or steps is None:
        return 0
    return -(-steps // every) * MAX_ROWS * (2 if settings.trains_on_pairs else 1)


def _drawing(settings: Settings, seq_len: int) -> dict[str, Any]:
    """What of a Job says how answers are drawn and compared in a step; nothing for other tasks."""
    if not TASKS[settings.task].draws_answers:
        return {}
    return {
        "answer_len": settings.rl.answer_tokens(seq_len),
        "compares": None if settings.rl.beta == "auto" else settings.rl.beta > 0,
        "reward_parameters": _reward_parameters(settings.rl.reward),
    }


def _reward_parameters(reward: str | None) -> int:
    """Parameters of a reward model; 0 where a function scores."""
    if reward is None or scorer_of(reward).function is not None:
        return 0
    return models.resolve(reward, online=True).spec.parameters


def apply_resources(settings: Settings, target: Target) -> Target:
    """``target`` with what the settings ask for of nodes and GPUs."""
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
    )


def summarise_plan(plan: Plan) -> str:
    """The plan in a line, for the log of a task."""
    layout, memory = plan.layout, plan.prediction.memory
    machine = f"{plan.request.gpus_per_node}x {plan.request.gpu_type}" if plan.request.gpu_type else "CPU"
    return (
        f"plan: {plan.model}, {plan.method} with {plan.engine}, {layout.nodes} node(s) of {machine}, "
        f"{layout.sharding}, micro batch {layout.micro_batch_size} x {layout.accumulation}, "
        f"memory of a process {memory.describe()}"
    )


def read_data(
    settings: Settings, folder: Path, *, fetch: Callable[[str, Path], Path] = sources.fetch
) -> tuple[StoredRows, StoredRows | None]:
    """The rows to train on, and those of a held-out file of the user's own, checked, in ``folder``/rows.

    ``fetch`` brings a dataset, as ``settings.dataset`` names it, to a file in a folder.
    """
    shutil.rmtree(folder / "rows", ignore_errors=True)  # of an earlier attempt, with other settings
    with stored.Writer(folder / "rows" / "train") as writer:
        for number, name in enumerate(mixture.names(settings)):
            path = fetch(name, folder / (f"mixture-{number}" if number else "dataset"))
            before = len(writer)
            for sample in _samples_of(settings, name, path):
                writer.add(sample.of_source(number) if number else sample)
            print(f"{name}: {len(writer) - before:,} rows, all of them well-formed", flush=True)
    if settings.evaluation.dataset:
        with stored.Writer(folder / "rows" / "held-out") as writer:
            path = fetch(settings.evaluation.dataset, folder / "held_out")
            for sample in _samples_of(settings, settings.evaluation.dataset, path):
                writer.add(sample)
    return stored_data(folder / "rows")


def stored_data(folder: Path) -> tuple[StoredRows, StoredRows | None]:
    """What :func:`read_data` has left in its folder of rows."""
    held_out = folder / "held-out"
    return StoredRows(folder / "train"), StoredRows(held_out) if held_out.is_dir() else None


def read_samples(settings: Settings, path: Path) -> Iterator[Sample]:
    """The rows of a file as the task takes them: conversations, pairs, judged answers, prompts, texts.

    Raises UserError before the first row or after the last one.
    """
    if settings.task == "pretrain":
        return texts.read(path)
    if TASKS[settings.task].images:
        return pictures.read(path, min_side=image_runs.least_side(settings))
    if texts.is_text_file(path):
        raise UserError(
            f"Dataset {path} is plain text, which task {settings.task} does not learn.",
            ("Give ", Change("task", "pretrain"), ", or JSONL."),
        )
    if TASKS[settings.task].judged:
        return preferences.read_judged(path)
    if TASKS[settings.task].draws_answers:
        return prompts.read(path)
    return preferences.read(path) if settings.trains_on_pairs else rows.read(path)


def _samples_of(settings: Settings, name: str, path: Path) -> Iterator[Sample]:
    """The rows of a dataset as the task takes them, if it is built in converted from its chats."""
    if sources.kind_of(name) != "built-in" or TASKS[settings.task].images:
        return read_samples(settings, path)
    chats = rows.read(path)
    if settings.task == "pretrain":
        return texts.from_conversations(chats)
    if TASKS[settings.task].judged:
        return preferences.judged_from(preferences.from_conversations(chats))
    return preferences.from_conversations(chats) if settings.trains_on_pairs else chats


def fetch_weights(model: ModelSource, folder: Path, *, rewards: bool = False) -> Path:
    """The model's files on this machine, whole (:func:`launchers.models.weights.fetch`), of one model.

    That they fit their config.json is looked at where transformers is installed, as where runs train.
    ``rewards``: it is a reward model.
    """
    path = weights.fetch(model, folder)
    is_pipeline = isinstance(model, ModelRef) and isinstance(model.spec, DiffusionSpec)
    if model.kind != "made" and not is_pipeline and importlib.util.find_spec("transformers") is not None:
        check_fits(path, rewards=rewards)
    if isinstance(model, ModelRef) and untried.is_untried(model.spec.family):
        held = sum(map(math.prod, tensor_shapes(path).values()))
        print(
            f"{model.name}: its files hold {held / 1e9:.2f} B parameters; the plan, for a family that is "
            f"untried here, counted {model.spec.parameters / 1e9:.2f} B",
            flush=True,
        )
    return path


def tokenise(
    samples: Sequence[Sample],
    held_out: Sequence[Sample] | None,
    settings: RunConfig,
    model_dir: Path,
    folder: Path,
) -> PreparedInfo:
    """Write the tokenised data into ``folder``, once for all ranks, and show what became of a row.

    ``held_out``: rows of the user's own; None: some of the others are held out.
    ``model_dir`` needs the configuration and the tokenizer only.
    """
    if TASKS[settings.task].images:
        info = image_runs.prepare(samples, held_out, settings, folder)
        _tell_short_run(settings, info.total_steps)
        return info
    print(f"tokenizing {len(samples):,} rows with the tokenizer of {settings.model}", flush=True)
    from launchers.dataset import prepare, render

    train, drawn = prepare.split(samples, settings)
    if settings.mixture:
        train = mixture.weighted(train, settings)
        print(mixture.summary(train, settings))
    info = prepare.prepare(train, model_dir, settings, settings.seq_len, folder, held_out or drawn)
    print(prepare.summary(info, " + ".join(mixture.names(settings))))
    _tell_short_run(settings, info.total_steps)
    checks.check_window(settings, info.total_steps)
    checks.check_evaluations(settings, info.total_steps)
    if settings.evaluation.in_training and not (folder / "heldout").is_dir():
        raise UserError(
            "evaluation.every_steps: no row is held out that could be evaluated while the run trains.",
            "Give evaluation.dataset, or more rows.",
        )
    if settings.tokens is not None:
        trained = sum(tokens_of_steps(Prepared(folder)))
        print(
            f"{settings.tokens:,} tokens are reached with {info.total_steps:,} steps: {trained:,} tokens, "
            f"{trained / info.tokens:.2f} times the data"
        )
    tokenizer = render.load_tokenizer(model_dir, settings)
    print(prepare.sample_view(Prepared(folder), tokenizer), flush=True)
    return info


def short_run_warning(settings: Settings, total_steps: int) -> str | None:
    """A line for a run that ends within its warm-up, whose first step has a learning rate of 0; else None."""
    warmup = warmup_steps(settings.schedule, total_steps)
    if total_steps > warmup:
        return None
    if total_steps == 1:
        return (
            "WARNING: the run has one step, and the warm-up begins at a learning rate of 0: nothing is "
            "learned; give more rows or epochs, or schedule.warmup_steps 0"
        )
    return (
        f"WARNING: the warm-up has {warmup:,} steps and the run {total_steps:,}: the learning rate does not "
        "reach its peak"
    )


def _tell_short_run(settings: Settings, total_steps: int) -> None:
    warning = short_run_warning(settings, total_steps)
    if warning is not None:
        print(warning)
