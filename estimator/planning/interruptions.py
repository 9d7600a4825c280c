"""Interruptions of spot nodes: frequency, lost time, and the best checkpoint interval.

A run stops when it loses a node, waits for another one and resumes from the last stored checkpoint. N nodes
are interrupted N times as often as one: the mean time between interruptions is M = 1 / (N x rate), assuming
independence. Interruption notices of the cloud are not relied on.
"""

from __future__ import annotations

import math

from estimator.formatting import format_duration
from estimator.plan import Interruptions
from estimator.planning.interruption_rates import Rate
from estimator.planning.start_up import rates_of

ENDS_WELL = 0.5  # probability of finishing below which a run is refused
# Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher
# order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems
# 22(3), 2006
FORMULA = "Young 1974, Daly 2006"


def foresee(
    rate: Rate,
    *,
    nodes: int,
    checkpoint_bytes: int,
    bytes_per_second: float | None,
    cloud: str | None,
    network_gbps: float | None,
    restart_hours: float,
) -> Interruptions | None:
    """Predict the effect of interruptions on a run with this many nodes; None if the rate is unknown.

    Parameters
    ----------
    checkpoint_bytes:
        Of one node.
    bytes_per_second:
        Checkpoint rate of one node in earlier runs; None: use the rate of the cloud's disk.
    restart_hours:
        From the loss of a node to the first step, without waiting for capacity.
    """
    if rate.per_node_hour is None:
        return None
    disk = rates_of(cloud).disk_bytes_per_second
    network = math.inf if network_gbps is None else network_gbps * 1e9 / 8
    writing = checkpoint_bytes / (bytes_per_second or disk)
    storing = checkpoint_bytes / min(network, disk)
    between = 3600 / (rate.per_node_hour * nodes)
    return Interruptions(
        nodes=nodes,
        per_node_hour=rate.per_node_hour,
        source=rate.source,
        checkpoint_seconds=writing,
        checkpoint_basis="measured in earlier runs" if bytes_per_second else "bytes over the disk's rate",
        store_seconds=storing,
        restart_seconds=restart_hours * 3600,
        interval_seconds=max(interval(writing, between), storing),
    )


def interval(checkpoint_s: float, between_s: float) -> float:
    """Return the optimum interval of checkpoints in seconds: sqrt(2 C M), :data:`FORMULA`.

    ``checkpoint_s``: pause of training per checkpoint; ``between_s``: mean time between interruptions.
    """
    return math.sqrt(2 * checkpoint_s * between_s)


def wall_hours(hours: float, found: Interruptions) -> float:
    """Return the wall-clock hours for this many hours of training, with checkpoints, lost work and restarts.

    T = M e^(R/M) (e^((w + C)/M) - 1) x work / w: Daly's complete model (2006, section 3) for work w between
    checkpoints of duration C, and restart time R. Training during the upload of a checkpoint is lost as well,
    so the upload counts as part of R.
    """
    between = 3600 / (found.per_node_hour * found.nodes)
    work = hours * 3600
    if work <= 0:
        return 0.0
    each = min(found.interval_seconds, work) or 1.0
    restart = found.restart_seconds + found.store_seconds
    try:
        again = math.exp(restart / between) * math.expm1((each + found.checkpoint_seconds) / between)
    except OverflowError:
        return math.inf
    return between * again / each * hours


def expected(wall: float, found: Interruptions) -> float:
    """Return the expected number of interruptions in this time (hours)."""
    return wall * found.per_node_hour * found.nodes


def ends_well(wall: float, found: Interruptions, budget: int) -> float:
    """Return the probability (0 to 1) of at most ``budget`` interruptions in this time (Poisson)."""
    mean = expected(wall, found)
    if not math.isfinite(mean):
        return 0.0
    logs = (count * math.log(mean) - mean - math.lgamma(count + 1) for count in range(budget + 1))
    return min(1.0, math.fsum(map(math.exp, logs))) if mean > 0 else 1.0


def against_budget(wall: float, found: Interruptions, budget: int) -> str | None:
    """Return the reason, with the arithmetic, why a run of this length would hardly finish, or None."""
    chance = ends_well(wall, found, budget)
    if chance >= ENDS_WELL:
        return None
    if not math.isfinite(wall):
        return f"it never reaches the next checkpoint: {_each(found)}"
    return (
        f"{format_duration(wall * 3600)} on {_each(found)}: {expected(wall, found):,.1f} expected "
        f"interruptions, {budget} allowed; {chance:.1%} of such runs finish"
    )


def in_words(found: Interruptions) -> list[str]:
    """Format the expected interruptions and checkpoint interval as lines of a plan's reasons."""
    between = 3600 / (found.per_node_hour * found.nodes)
    lines = [f"{_each(found)} ({found.source})"]
    if found.expected is not None and found.lost_hours is not None and found.ends_well is not None:
        lines[0] += (
            f": {found.expected:,.1f} interruptions and {format_duration(found.lost_hours * 3600)} "
            f"without progress are expected; {found.ends_well:.0%} of such runs finish"
        )
    every = format_duration(found.interval_seconds)
    steps = "" if found.steps is None else f"{found.steps:,} steps, "
    if found.interval_seconds > interval(found.checkpoint_seconds, between):
        why = f"the duration of an upload ({found.checkpoint_basis})"
    else:
        why = (
            f"sqrt(2 x {format_duration(found.checkpoint_seconds)} for one ({found.checkpoint_basis}) x "
            f"{format_duration(between)} between interruptions), {FORMULA}"
        )
    return [*lines, f"a checkpoint every {steps}{every}: {why}"]


def untold(rate: Rate) -> str:
    """Format the line of a plan's reasons for an unknown rate."""
    return (
        f"interruption rate of these spot nodes unknown (see {rate.where}): hours and price exclude lost "
        "work; set it with --interruption-rate"
    )


def _each(found: Interruptions) -> str:
    return f"{found.nodes} spot node(s) with {found.per_node_hour:g} interruptions per node and hour"
