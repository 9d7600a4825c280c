"""Reasons for the choice of a layout and an instance type."""

from __future__ import annotations

import math
from dataclasses import replace

from estimator.engines import automatic, fp16, varlen, vision
from estimator.engines.setups import setup_of
from estimator.engines.support import untested_family_note
from estimator.formatting import format_bytes, format_count, format_duration, format_list, format_usd
from estimator.job import DEGREES, Job, Target
from estimator.memory import latents
from estimator.memory.generation import grpo_batch, kv_cache_bytes
from estimator.memory.states import compute_size
from estimator.models import DiffusionSpec, ModelSpec, weight_formats
from estimator.plan import Layout, MemoryEstimate
from estimator.planning.candidates import TIE_MARGIN, Candidate
from estimator.planning.capacity import why_rare
from estimator.planning.goals import Goals
from estimator.planning.ladders import LARGEST_MICRO_BATCH
from estimator.planning.measured_gpus import UNMEASURED
from estimator.planning.ranking import PACES, compare_prices, compare_speeds, format_change, paced_by, unknown
from estimator.planning.search import Search
from estimator.planning.step_requests import PREPARE_CPU
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, METHODS, QUANTIZATIONS, TASKS


def of_layout(search: Search, candidate: Candidate) -> list[str]:
    """Explain precision, sharding, parallelism, micro batch and checkpointing, one line each."""
    job, layout = search.job, candidate.layout
    return [
        _precision(job, layout),
        *_base(job),
        _sharding(job, layout),
        *_parallelism(job, layout),
        _micro_batch(search, candidate),
        _checkpointing(search, candidate),
        *automatic.reason(search.requested, layout.device, layout.precision, layout.sharding),
        *automatic.float8_reason(job, candidate.gpu),
        *_document_separation(job, candidate),
        *_varying_lengths(job, candidate),
        *vision.reasons(job),
        *_task(search, candidate),
        *_conversion(job.model, vision=job.vision is not None),
        *filter(None, [untested_family_note(job.model)]),
    ]


def _conversion(model: ModelSpec, *, vision: bool) -> list[str]:
    """Explain the one-time conversion of a published checkpoint that is quantized or multimodal."""
    lines = []
    if (published := weight_formats.format_of(model)) is not None:
        files = format_bytes(weight_formats.file_bytes(model))
        converted = format_bytes(weight_formats.BF16_BYTES * model.stored_parameters)
        seconds = weight_formats.conversion_seconds(model, PREPARE_CPU)
        lines.append(
            f"{published.title} weights are dequantized to bf16 once, on {PREPARE_CPU} CPU cores: {files} to "
            f"{converted} on disk, at most about {format_duration(seconds)}; the exported model is bf16"
        )
    if model.sees_images and not vision:
        lines.append("of this multimodal checkpoint the language model alone is trained and exported")
    return lines


def _precision(job: Job, layout: Layout) -> str:
    if layout.precision == "fp32":
        if job.precision == "fp32":
            return "precision fp32, as requested"
        return f"precision fp32: {'CPUs have' if layout.device == 'cpu' else 'this GPU has'} no fast bf16"
    if layout.precision == fp16.PRECISION:
        reason = "as requested" if job.precision == fp16.PRECISION else "this GPU has no bf16"
        return f"precision fp16 with loss scaling, trained weights in fp32: {reason}"
    if layout.precision == "bf16":
        return "precision bf16, including weights and optimizer states"
    if job.engine == "trl" and job.adapters:
        return "precision bf16 for the frozen base, adapters in fp32, as in PEFT with autocast"
    engine = "autocast" if job.engine == "trl" else ENGINES[job.engine].title
    return f"precision bf16 with fp32 master weights, as in {engine}"


def _task(search: Search, candidate: Candidate) -> list[str]:
    """Explain the cost of the task relative to SFT of the same number of rows on the same machines."""
    job, layout = search.job, candidate.layout
    task = TASKS[job.task]
    if task.draws_answers:
        return [_answer_generation(search, candidate)]
    if isinstance(job.model, DiffusionSpec):
        return [_latents(job.model, candidate)]
    reason = task.extra_cost
    if not reason:
        return []
    if task.compares:
        forward = "forward pass" if task.pairs else "forward passes on both"
        passes = {"adapters-off": f", and the reference's {forward}", "copy": ", and the reference's model"}
        precomputed = f", the reference's {forward} once before training"
        reason += passes.get(setup_of(job, layout).reference, precomputed)
    sft_speed = search.speed(layout, candidate.gpu, candidate.place, task="sft").tokens_per_second
    task_speed = candidate.speed.tokens_per_second
    if sft_speed is None or task_speed is None:
        return [f"{job.task}: {reason}; its time relative to sft is unknown"]
    ratio = task.sequences_per_row * sft_speed / task_speed
    return [f"{job.task}: {ratio:.1f} times the time and price of sft on the same number of rows: {reason}"]


def _latents(model: DiffusionSpec, candidate: Candidate) -> str:
    """Describe the precomputed latents and texts, and the memory for them."""
    layout, memory = candidate.layout, candidate.memory
    on_gpu = layout.device == "cuda"
    together = latents.images_at_once(model, memory.capacity_bytes if on_gpu else None)
    images = together * latents.image_bytes(model)
    needs = format_bytes(latents.network_bytes(model, on_gpu=on_gpu) + images)
    return (
        f"latents and texts are computed once before training, on one of its nodes, {together} "
        f"image{'s' if together > 1 else ''} at once: {needs}; training needs no VAE and no text encoder"
    )


def _answer_generation(search: Search, candidate: Candidate) -> str:
    """Describe answer generation in a GRPO step: completions, KV cache, and share of the step time."""
    setup = search.setup(candidate.layout)
    batch = grpo_batch(setup)
    cache = kv_cache_bytes(setup.model, batch.sequences, batch.tokens, bytes_each=compute_size(setup))
    line = (
        f"grpo: a process generates the {batch.sequences} completions of a step at once, up to "
        f"{batch.new_tokens} tokens each: KV cache of {format_bytes(cache)}, freed before the activations"
    )
    parts = candidate.speed.parts
    return line if parts is None else f"{line}; {parts.generation / parts.total:.0%} of the step's time"


def _base(job: Job) -> list[str]:
    if not METHODS[job.method].quantized:
        return []
    return [f"frozen base in {job.quantization}: {QUANTIZATIONS[job.quantization].description}"]


def _sharding(job: Job, layout: Layout) -> str:
    setup = setup_of(job, layout)
    if layout.sharding == "none":
        return "no sharding: one process" if layout.world_size == 1 else "no sharding: one copy of the model"
    if layout.sharding == "ddp":
        return f"DDP: each of {layout.world_size} processes holds the complete model"
    if job.engine == "megatron":
        return f"distributed optimizer: states sharded over {setup.shard} processes"
    stage = setup.zero_stage
    if stage is None and layout.replicate > 1 and setup.shard == 1:
        return f"no sharding, as requested: each of {layout.replicate} processes holds the complete model"
    if stage is None and layout.replicate > 1:
        return (
            f"HYBRID_SHARD: sharded over {setup.shard} processes, {layout.replicate} copies, so that only "
            "gradients cross node boundaries"
        )
    if layout.sharding == "shard_grad_op":
        return (
            f"FSDP grad-op: weights, gradients and optimizer sharded over {setup.shard} processes; weights "
            "stay gathered between the forward and the backward pass"
        )
    if stage is None and layout.world_size == 1:
        return "FSDP in one process: 16-bit copies of one block's weights at a time, which need less memory"
    if stage is None:
        return f"FSDP: weights, gradients and optimizer sharded over {setup.shard} processes"
    if job.zero_stage is not None:
        return f"ZeRO stage {stage}, as requested"
    if layout.world_size == 1:
        return f"ZeRO stage {stage}: one process"
    return f"ZeRO stage {stage}: the fastest that fits; lower stages save nothing or do not fit"


def _parallelism(job: Job, layout: Layout) -> list[str]:
    reasons = {
        "tensor_parallel": "inside a node, where the links are fast",
        "context_parallel": f"{layout.seq_len // layout.context_parallel} tokens per sequence and process",
        "pipeline_parallel": f"{job.model.layers // layout.pipeline_parallel} layers per stage, "
        f"{layout.schedule} schedule, {layout.accumulation} micro batches",
        "expert_parallel": f"{job.model.experts // layout.expert_parallel} experts per layer and process",
    }
    lines = []
    for name in DEGREES:
        degree = getattr(layout, name)
        if degree > 1:
            label = name.replace("_", " ")
            origin = "as requested" if getattr(job, name) else "the fastest of those that fit"
            lines.append(f"{label} {degree}, {origin}: {reasons[name]}")
    return lines


def _micro_batch(search: Search, candidate: Candidate) -> str:
    job, layout = search.job, candidate.layout
    micro = f"micro batch {layout.micro_batch_size}"
    if layout.accumulation > 1:
        micro += f" ({layout.accumulation} forward passes per step)"
    if job.micro_batch_size:
        return f"{micro}, as requested"
    if layout.pipeline_parallel > 1:
        return f"{micro}: least idle time of the pipeline"
    if layout.accumulation == 1:
        return f"{micro}: the complete batch fits in one forward pass"
    return f"{micro}: {_why_so_small(search, candidate)}"


def _why_so_small(search: Search, candidate: Candidate) -> str:
    """Explain why the micro batch is not larger: larger ones do not fit, are slower, or near the limit."""
    layout, capacity = candidate.layout, candidate.memory.capacity_bytes
    if layout.micro_batch_size == LARGEST_MICRO_BATCH:
        return "the largest one tried"
    text = "the largest that fits"
    if not layout.activation_checkpointing:
        text += " without activation checkpointing"
    if capacity is None:
        return text
    if layout.checkpointing not in ("off", "full"):
        return f"{text} with activation checkpointing {layout.checkpointing}"
    fitting = search.fitting(layout.nodes, layout.processes_per_node, capacity, candidate.gpu)
    kind = replace(layout, micro_batch_size=0, accumulation=0)
    same_kind = [fit for fit in fitting if replace(fit, micro_batch_size=0, accumulation=0) == kind]
    larger = max(same_kind, key=lambda fit: fit.micro_batch_size)
    if larger.micro_batch_size > layout.micro_batch_size:
        tight = search.estimate(larger, candidate.gpu).with_capacity(capacity)
        if tight.tight:
            return f"{larger.micro_batch_size} is tight: {tight.describe()}"
    same_checkpointing = [
        fit for fit in fitting if fit.activation_checkpointing == layout.activation_checkpointing
    ]
    if max(fit.micro_batch_size for fit in same_checkpointing) > layout.micro_batch_size:
        text += " with this sharding"
    largest = max(fitting, key=lambda fit: fit.micro_batch_size)
    if largest.micro_batch_size <= layout.micro_batch_size:
        return text
    rival_speeds = [search.speed(fit, candidate.gpu, candidate.place) for fit in (largest, layout)]
    speeds = [speed.tokens_per_second for speed in rival_speeds]
    change = "it" if largest.activation_checkpointing > layout.activation_checkpointing else "another"
    if speeds[0] is None or speeds[1] is None:
        return f"{text}; {largest.micro_batch_size} fits with {change}"
    difference = format_change(speeds[0] / speeds[1] - 1, "faster", "slower")
    return f"{text}; {largest.micro_batch_size} fits with {change}, and is {difference}"


def _checkpointing(search: Search, candidate: Candidate) -> str:
    layout = candidate.layout
    if search.job.activation_checkpointing is not None:
        return f"activation checkpointing {'on' if layout.activation_checkpointing else 'off'}, as requested"
    if not layout.activation_checkpointing:
        return "no activation checkpointing: the activations fit"
    capacity = candidate.memory.capacity_bytes or 0
    uncheckpointed = search.estimate(replace(layout, activation_checkpointing=False), candidate.gpu)
    uncheckpointed = uncheckpointed.with_capacity(capacity)
    if layout.checkpointing != "full" and not search.job.recompute and not search.job.recompute_every:
        return _part_recomputed(search, candidate, uncheckpointed)
    if uncheckpointed.verdict == "fits":
        return "activation checkpointing: allows this micro batch with less sharding"
    return f"activation checkpointing: without it this micro batch needs {uncheckpointed.describe()}"


def _part_recomputed(search: Search, candidate: Candidate, uncheckpointed: MemoryEstimate) -> str:
    """Compare partial activation checkpointing with checkpointing of complete blocks and with none."""
    layout = candidate.layout
    full = replace(layout, recompute="full", recompute_every=1)
    speed = search.speed(full, candidate.gpu, candidate.place).tokens_per_second
    gain = (candidate.speed.tokens_per_second or 0.0) / speed - 1 if speed else 0.0
    change = format_change(gain, "faster", "slower")
    return (
        f"activation checkpointing {layout.checkpointing}: {change} than full; "
        f"without it this micro batch needs {uncheckpointed.describe()}"
    )


def _document_separation(job: Job, candidate: Candidate) -> list[str]:
    """Explain how a loop engine separates packed documents on a GPU, if it uses a dense mask."""
    if not job.packing or candidate.layout.device != "cuda" or not ENGINES[job.engine].runs_loop:
        return []
    reason = varlen.unsupported(job.model, job.task, job.method, candidate.layout.precision)
    if job.variable_length is False:
        reason = "variable_length is false"
    return [f"packed documents are separated by a dense mask, which is slower: {reason}"] if reason else []


def _varying_lengths(job: Job, candidate: Candidate) -> list[str]:
    """Explain what limits the memory of batches of varying length, if that matters."""
    cuda = candidate.layout.device == "cuda" and (candidate.gpu is None or candidate.gpu.vendor == "nvidia")
    if job.packing or TASKS[job.task].images or not cuda or job.engine not in LAUNCHED_ENGINES:
        return []
    measures = ["the longest is first"] if job.longest_first else []
    measures += ["freed memory is reused (expandable segments)"] if job.expandable_segments else []
    return [f"batches vary in length: {', '.join(measures)}"] if measures else []


def of_machine(
    best: Candidate, candidates: list[Candidate], target: Target, goals: Goals, tokens: int | None
) -> list[str]:
    """Explain the choice of instance type and number of nodes; ``tokens``: of the complete job, if known."""
    place, gpu, layout = best.place, best.gpu, best.layout
    if place is None or gpu is None:
        return []
    size = f"{format_count(layout.nodes, 'node')} of {layout.processes_per_node}x {gpu.name}"
    rivals, conditions = _same_rank(best, candidates, target)
    kinds = len({candidate.place.name for candidate in rivals if candidate.place})
    machines = f"the {kinds} instance types" if kinds > 1 else "the layouts"
    if goals.deadline_hours is not None:
        conditions.append(f"finish within {goals.deadline_hours:g} h")
    if goals.budget_usd is not None:
        conditions.append(f"cost at most {format_usd(goals.budget_usd)}")
    machines += f" that {format_list(['fit', *conditions])}"
    if not place.name and target.gpus is None:
        line = f"{size}: chosen from 1 to {place.gpus} GPUs, as --gpus is not set"
    elif not place.name:
        line = f"{size}, as requested"
    elif target.instance_type:
        line = f"{size}: {place.name}, as requested"
    elif best.speed.tokens_per_second is not None and goals.by_speed:
        line = f"{size}: of {machines}, {place.name} is {_fastest(best, rivals, tokens)}"
    elif best.usd_per_token is not None:
        line = f"{size}: of {machines}, {place.name} is {_cheapest(best, rivals, goals, tokens)}"
    elif best.speed.tokens_per_second is not None:
        line = (
            f"{size}: of {machines}, {place.name} needs the fewest GPU-hours, or at most "
            f"{100 * TIE_MARGIN:.0f} % more; prices are unknown"
        )
    else:
        line = f"{size}: {place.name} fits; {unknown(best, goals)}"
    return [line, *_price_and_limits(best)]


def _same_rank(
    best: Candidate, candidates: list[Candidate], target: Target
) -> tuple[list[Candidate], list[str]]:
    """Return the candidates that are compared with the best by price or time, and what they have in common.

    Others rank later at any price (:func:`estimator.planning.ranking.sort_candidates`).
    """
    place = best.place
    knows_host_memory = place is not None and place.ram_bytes is not None
    is_usual = target.capacity == "usual" and not why_rare(place)
    rivals, conditions = candidates, []
    for condition, applies, holds in (
        ("", knows_host_memory, lambda item: item.place is None or item.place.ram_bytes),
        ("", not best.idle_gpus, lambda item: not item.idle_gpus),
        ("have measured GPUs", not best.unmeasured, lambda item: not item.unmeasured),
        ("are usually available", is_usual, lambda item: not why_rare(item.place)),
    ):
        remaining = [item for item in rivals if holds(item)] if applies else rivals
        if condition and len(remaining) < len(rivals):
            conditions.append(condition)
        rivals = remaining
    return rivals, conditions


def _cheapest(best: Candidate, candidates: list[Candidate], goals: Goals, tokens: int | None) -> str:
    """Describe in which sense a candidate is the cheapest: overall, or per hour among ties."""

    def cost(candidate: Candidate) -> float:
        usd = candidate.usd(tokens) if tokens is not None else candidate.usd_per_token
        return math.inf if usd is None else usd

    def hourly(candidate: Candidate) -> float:
        return math.inf if candidate.usd_per_hour is None else round(candidate.usd_per_hour, 2)

    least = min(map(cost, candidates))
    if cost(best) <= least:
        return "the cheapest" + ("" if tokens is not None else " per token")
    amount = format_usd(least) if tokens is not None else f"{format_usd(least * 1e6)} per million tokens"
    ties = [item for item in candidates if cost(item) <= least * (1 + TIE_MARGIN)]
    measure = paced_by(goals, tokens)
    passes_over = any(hourly(item) < hourly(best) for item in ties)
    pace = f" and {PACES[measure]}" if measure is not None and passes_over else ""
    return (
        f"the cheapest per hour ({format_usd(best.usd_per_hour)}) of those within {100 * TIE_MARGIN:.0f} % "
        f"of the lowest price ({amount}){pace}"
    )


def _fastest(best: Candidate, candidates: list[Candidate], tokens: int | None) -> str:
    """Describe in which sense a candidate is the fastest: overall, or the cheapest per hour among ties."""

    def time(candidate: Candidate) -> float:
        speed = candidate.speed.tokens_per_second
        hours = candidate.hours(tokens) if tokens is not None else None if speed is None else 1 / speed
        return math.inf if hours is None else hours

    if time(best) <= min(map(time, candidates)):
        return "the fastest"
    choice = "the cheapest per hour" if best.usd_per_hour is not None else "the smallest"
    return f"{choice} of those within {100 * TIE_MARGIN:.0f} % of the fastest"


def missed_goals_note(candidate: Candidate) -> list[str]:
    """Explain why a plan that misses the goals is shown."""
    return [f"{candidate.hardware} is the nearest of all that fit", *_price_and_limits(candidate)]


def compare_to_best(candidate: Candidate, best: Candidate) -> list[str]:
    """Compare a lower-ranked plan with the best one."""
    parts = [f"fits on {candidate.hardware}"]
    if candidate.usd_per_token is not None and best.usd_per_token is not None:
        parts.append(f"{compare_prices(candidate.usd_per_token / best.usd_per_token)} per token")
    speeds = (candidate.speed.tokens_per_second, best.speed.tokens_per_second)
    if speeds[0] is not None and speeds[1] is not None:
        parts.append(compare_speeds(speeds[0] / speeds[1]))
    parts[1:] = [f"compared with the best: {', '.join(parts[1:])}"] if parts[1:] else []
    return ["; ".join(parts), *_price_and_limits(candidate)]


def _price_and_limits(candidate: Candidate) -> list[str]:
    """Return the source of the price, and the caveats of the instance type."""
    place = candidate.place
    if place is None:
        return []
    lines = [f"price: {place.price}"] if place.price else []
    scarcity = why_rare(place)
    if scarcity:
        lines.append(f"low availability: {scarcity}")
    if candidate.unmeasured:
        lines.append(UNMEASURED)
    if candidate.idle_gpus:
        gpus = candidate.layout.processes_per_node
        lines.append(f"{gpus} of the {place.gpus} GPUs of {place.name} are used, but all are paid")
    if place.ram_bytes is None and not place.name:
        lines.append(f"host memory: {format_bytes(candidate.memory.host_bytes)} per node are needed")
    elif place.ram_bytes is None:
        needs = format_bytes(candidate.memory.host_bytes)
        lines.append(f"host memory: {needs} per node are needed; that of {place.name} is unknown")
    return [*lines, *place.notes]
