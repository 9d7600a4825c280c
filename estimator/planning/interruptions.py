"""Interruptions of spot nodes: frequency, lost time, and the best checkpoint interval.

A run stops when it loses a node, waits for another one and resumes from the last stored checkpoint. N nodes
are interrupted N times as often as one: the mean time between interruptions is M = 1 / (N x rate), assuming
independence. Interruption notices of the cloud are not relied on.
"""

from __future__ import annotations

import math

from estimator.formatting import format_count, format_duration
from estimator.plan import Interruptions
from estimator.planning.interruption_rates import Rate
from estimator.planning.start_up import rates_of

LEAST_COMPLETION_PROBABILITY = 0.5  # probability of finishing below which a run is refused
# Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher
# order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems
# 22(3), 2006
FORMULA = "Young 1974, Daly 2006"


def predict_interruptions(
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
    mean_seconds = 3600 / (rate.per_node_hour * nodes)
    return Interruptions(
        nodes=nodes,
        per_node_hour=rate.per_node_hour,
        source=rate.source,
        checkpoint_seconds=writing,
        checkpoint_basis="measured in earlier runs" if bytes_per_second else "bytes over the disk's rate",
        store_seconds=storing,
        restart_seconds=restart_hours * 3600,
        interval_seconds=max(interval(writing, mean_seconds), storing),
    )


def interval(checkpoint_s: float, between_s: float) -> float:
    """Return the optimum interval of checkpoints in seconds: sqrt(2 C M), :data:`FORMULA`.

    ``checkpoint_s``: pause of training per checkpoint; ``between_s``: mean time between interruptions.
    """
    return math.sqrt(2 * checkpoint_s * between_s)


def wall_hours(hours: float, spot: Interruptions) -> float:
    """Return the wall-clock hours for this many hours of training, with checkpoints, lost work and restarts.

    T = M e^(R/M) (e^((w + C)/M) - 1) x work / w: Daly's complete model (2006, section 3) for work w between
    checkpoints of duration C, and restart time R. Training during the upload of a checkpoint is lost as well,
    so the upload counts as part of R.
    """
    mean_seconds = 3600 / expected(1.0, spot)
    work = hours * 3600
    if work <= 0:
        return 0.0
    interval_seconds = min(spot.interval_seconds, work) or 1.0
    restart = spot.restart_seconds + spot.store_seconds
    try:
        expansion = math.exp(restart / mean_seconds) * math.expm1(
            (interval_seconds + spot.checkpoint_seconds) / mean_seconds
        )
    except OverflowError:
        return math.inf
    return mean_seconds * expansion / interval_seconds * hours


def expected(wall: float, spot: Interruptions) -> float:
    """Return the expected number of interruptions in ``wall`` hours."""
    return wall * spot.per_node_hour * spot.nodes


def completion_probability(wall: float, spot: Interruptions, budget: int) -> float:
    """Return the probability (0 to 1) of at most ``budget`` interruptions in ``wall`` hours (Poisson)."""
    mean = expected(wall, spot)
    if not math.isfinite(mean):
        return 0.0
    logs = (count * math.log(mean) - mean - math.lgamma(count + 1) for count in range(budget + 1))
    return min(1.0, math.fsum(map(math.exp, logs))) if mean > 0 else 1.0


def completion_obstacle(wall: float, spot: Interruptions, budget: int) -> str | None:
    """Return the reason, with the arithmetic, why a run of this length would hardly finish, or None."""
    probability = completion_probability(wall, spot, budget)
    if probability >= LEAST_COMPLETION_PROBABILITY:
        return None
    if not math.isfinite(wall):
        return f"it never reaches the next checkpoint: {_describe_rate(spot)}"
    return (
        f"{format_duration(wall * 3600)} on {_describe_rate(spot)}: {expected(wall, spot):,.1f} expected "
        f"interruptions, {budget} allowed; {probability:.1%} of such runs finish"
    )


def describe(spot: Interruptions) -> list[str]:
    """Format the expected interruptions and checkpoint interval as lines of a plan's reasons."""
    mean_seconds = 3600 / expected(1.0, spot)
    lines = [f"{_describe_rate(spot)} ({spot.source})"]
    if spot.expected is not None and spot.lost_hours is not None and spot.ends_well is not None:
        lines[0] += (
            f": {spot.expected:,.1f} interruptions and {format_duration(spot.lost_hours * 3600)} "
            f"without progress are expected; {spot.ends_well:.0%} of such runs finish"
        )
    interval_text = format_duration(spot.interval_seconds)
    steps = "" if spot.steps is None else f"{spot.steps:,} steps, "
    if spot.interval_seconds > interval(spot.checkpoint_seconds, mean_seconds):
        basis = f"the duration of an upload ({spot.checkpoint_basis})"
    else:
        basis = (
            f"sqrt(2 x {format_duration(spot.checkpoint_seconds)} for one ({spot.checkpoint_basis}) x "
            f"{format_duration(mean_seconds)} between interruptions), {FORMULA}"
        )
    return [*lines, f"a checkpoint every {steps}{interval_text}: {basis}"]


def unknown_rate(rate: Rate) -> str:
    """Format the line of a plan's reasons for an unknown rate."""
    return (
        f"interruption rate of these spot nodes unknown (see {rate.where}): hours and price exclude lost "
        "work; set it with --interruption-rate"
    )


def _describe_rate(spot: Interruptions) -> str:
    """Format the number of spot nodes and their rate of interruptions."""
    return (
        f"{format_count(spot.nodes, 'spot node')} with {spot.per_node_hour:g} interruptions per node and hour"
    )
