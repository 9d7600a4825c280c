"""Engine ``auto``: compare the engines that can train a job by their predicted speed on the same machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from estimator.formatting import format_list
from estimator.job import Job, Target
from estimator.planning.candidates import TIE_MARGIN
from estimator.planning.clusters import Survey, disk_shortage, host_memory_shortage
from estimator.planning.ranking import figure, format_change
from estimator.planning.search import Evidence, Search, precision_of
from estimator.vocabulary import ENGINES

COMPARED_MACHINES = 2  # instance types on which engines are compared, the best with the simplest engine
# Wins ties on GPUs: its defaults were measured on one (benchmarks/results/gpu_speed.md), those of the other
# engines were not
TIE_WINNER = "fsdp2"
MIN_REPORTED_DIFFERENCE = 0.001  # minimum difference to report
Speeds = Mapping[str, float | None]
"""Tokens per second by engine; None: it does not fit, or its speed is unknown."""


def keeps_masters(job: Job) -> bool:
    """Return whether the engine keeps fp32 copies of the weights, in full training with precision auto."""
    return job.method == "full" and job.precision == "auto" and ENGINES[job.engine].precisions[0] != "bf16"


def by_preference(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group the jobs by engine: first those with fp32 master weights; within a group by preference.

    A later group is used only if no engine of an earlier one has a plan. If all engines keep master weights,
    the last group consists of those that also support pure bf16, in that precision.
    """
    jobs = sorted(jobs, key=lambda job: job.engine != TIE_WINNER)
    fp32_masters = [job for job in jobs if keeps_masters(job)]
    without_masters = [job for job in jobs if not keeps_masters(job)] or [
        replace(job, precision="bf16") for job in fp32_masters if "bf16" in ENGINES[job.engine].precisions
    ]
    return [group for group in (fp32_masters, without_masters) if group]


def faster_than(engine: str, speeds: Speeds) -> str | None:
    """Return the fastest engine if it is faster than ``engine`` by more than a tie."""
    current = speeds[engine] or 0.0
    known_speeds = {name: speed for name, speed in speeds.items() if speed}
    fastest = max(known_speeds, key=lambda name: known_speeds[name], default=engine)
    return fastest if (speeds[fastest] or 0.0) > current * (1 + TIE_MARGIN) else None


def clearly_better(survey: Survey, jobs: Sequence[Job]) -> Job | None:
    """Return the engine with a clearly better plan than the survey's best on its best instance types.

    It compares the ranking figure: price, GPU-hours or time.
    """
    best = survey.candidates[0]
    rivals: list[tuple[float, Job]] = []
    for job in jobs:
        if job.engine != survey.job.engine:
            rival = next(iter(survey.by_engine(job, machines=COMPARED_MACHINES).candidates), None)
            if rival is not None and rival.idle_gpus <= best.idle_gpus:
                rivals.append((figure(rival, survey.goals, survey.tokens), job))
    if not rivals:
        return None
    least, rival_job = min(rivals, key=lambda pair: pair[0])
    return rival_job if least * (1 + TIE_MARGIN) < figure(best, survey.goals, survey.tokens) else None


def speeds_on_best(survey: Survey, jobs: Sequence[Job], target: Target, evidence: Evidence) -> Speeds:
    """Return the speed of each engine on the hardware of a survey's best candidate."""
    best, speeds = survey.candidates[0], dict[str, float | None]()
    layout, place, gpu, capacity = best.layout, best.place, best.gpu, best.memory.capacity_bytes
    for job in jobs:
        if job.engine == survey.job.engine:
            speeds[job.engine] = best.speed.tokens_per_second
            continue
        batch = {name: getattr(survey.job, name) for name in ("global_batch_size", "batch_multiple")}
        rival = replace(job, **batch)
        search = Search(rival, precision_of(rival, "cuda", gpu), "cuda", evidence)
        candidate = search.best(layout.nodes, layout.processes_per_node, capacity or 0, gpu, place)
        if (
            candidate is not None
            and place is not None
            and (host_memory_shortage(candidate, place) or disk_shortage(rival, target, candidate, place))
        ):
            candidate = None
        speeds[job.engine] = candidate.speed.tokens_per_second if candidate is not None else None
    return speeds


def reason(engine: str, speeds: Speeds, *, skipped: str = "") -> str:
    """Explain the choice of the engine in one line, with the runner-up and the difference.

    ``skipped``: why engines with fp32 master weights were not chosen, as a clause.
    """
    prefix = f"{skipped}; " if skipped else ""
    other_speeds = {name: speed for name, speed in speeds.items() if speed and name != engine}
    absent = [name for name, speed in speeds.items() if not speed and name != engine]
    chosen_speed = speeds[engine]
    if not other_speeds or not chosen_speed:
        only_engine_reason = (
            "weights and optimizer states are in bf16" if skipped else "no other engine supports it"
        )
        explanation = f"{format_list(absent)} would not fit on these GPUs" if absent else only_engine_reason
        return f"engine {engine}: {prefix}{explanation}"
    second = max(other_speeds, key=lambda name: other_speeds[name])
    gain = other_speeds[second] / chosen_speed - 1
    difference = (
        format_change(gain, "faster", "slower") if abs(gain) >= MIN_REPORTED_DIFFERENCE else "as fast"
    )
    tie = MIN_REPORTED_DIFFERENCE <= gain <= TIE_MARGIN
    advantage = "was measured with its defaults" if engine == TIE_WINNER else "is simpler"
    preferred = f", a tie, and {engine} {advantage}" if tie else ""
    return f"engine {engine}: {prefix}the runner-up, {second}, is {difference} on these GPUs{preferred}"
