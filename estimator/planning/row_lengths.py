"""Memory prediction of a plan for the rows of its data, which may all be shorter than the planned length."""

from __future__ import annotations

from dataclasses import replace

from estimator import calibration
from estimator.job import Job
from estimator.plan import Plan
from estimator.planning.search import Evidence, Search


def predict_for_rows(plan: Plan, job: Job, longest_row: int) -> Plan:
    """Return the plan with the memory predicted for rows of at most ``longest_row`` tokens.

    Batches are padded to their longest row, so a run on short rows needs less memory than planned. Compared
    with the plan's own prediction, its measurement would make later predictions too small. The plan is
    unchanged if the data has rows of the planned length. Layout, speed and requested resources stay.
    ``job``: with method and engine decided.
    """
    layout, planned = plan.layout, plan.prediction.memory
    if longest_row >= layout.seq_len:
        return plan
    search = Search(job, layout.precision, layout.device, Evidence())
    estimate = search.estimate(replace(layout, seq_len=longest_row))
    estimate = replace(
        calibration.corrected_alike(estimate, planned),
        host_bytes=planned.host_bytes,
        formulas=planned.formulas,
    )
    rows = f"rows of up to {longest_row:,} tokens, the longest of the data"
    estimate = replace(estimate, shows_basis=f"{rows}; {estimate.shows_basis}")
    memory = estimate.with_capacity(planned.capacity_bytes)
    return replace(plan, prediction=replace(plan.prediction, memory=memory))
