"""A plan as a flat row, for CSV, JSON and tables."""

from __future__ import annotations

from typing import Any

from estimator.plan import Plan
from estimator.planning.report import describe_layout


def usd_per_million_tokens(plan: Plan) -> float | None:
    """Price of a million training tokens in USD; None if price or speed is unknown."""
    prediction = plan.prediction
    if prediction.usd_per_hour is None or prediction.tokens_per_second is None:
        return None
    return prediction.usd_per_hour / 3600 / prediction.tokens_per_second * 1e6


def row_of(rank: int, plan: Plan) -> dict[str, Any]:
    """Convert a plan to a flat row with sizes in bytes and prices in USD; None: unknown."""
    request, layout, prediction = plan.request, plan.layout, plan.prediction
    return {
        "rank": rank,
        "model": plan.model,
        "method": plan.method,
        "engine": plan.engine,
        "instance_type": request.instance_type,
        "cloud": request.cloud,
        "nodes": request.nodes,
        "gpus_per_node": request.gpus_per_node,
        "gpu_type": request.gpu_type,
        "layout": describe_layout(layout),
        "micro_batch_size": layout.micro_batch_size,
        "accumulation": layout.accumulation,
        "activation_checkpointing": layout.activation_checkpointing,
        "needs_bytes": prediction.memory.needs_bytes,
        "needs_upper_bytes": prediction.memory.needs_range[1],
        "shows_bytes": prediction.memory.shows_bytes,
        "shows_upper_bytes": prediction.memory.shows_range[1],
        "capacity_bytes": prediction.memory.capacity_bytes,
        "headroom_bytes": prediction.memory.headroom_bytes,
        "out_of_memory_risk": prediction.memory.out_of_memory_risk,
        "verdict": prediction.memory.verdict,
        "tokens_per_second": prediction.tokens_per_second,
        "hours": prediction.hours,
        "usd_per_hour": prediction.usd_per_hour,
        "usd": prediction.usd,
        "usd_per_million_tokens": usd_per_million_tokens(plan),
        "start_up_minutes": None if prediction.start_up is None else prediction.start_up.hours * 60,
        "low_availability": prediction.low_availability,
    }
