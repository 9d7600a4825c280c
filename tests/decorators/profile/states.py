"""CardStates for the tests of the card."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decorators.card.state import CardState
from decorators.profile.measured import GpuMeasured, Measured
from decorators.profile.sampling import GpuSample, GpusSample, HostSample
from estimator.plan import Plan
from launchers.report.state import RunState
from launchers.report.telemetry import Event
from tests.decorators.flows.plans import make_plan
from tests.decorators.flows.synthetic import events

GIB = 2**30
STARTED = 1_000_000.0


def make_state(
    *,
    steps: int = 120,
    on_gpus: bool = True,
    nvml: bool = True,
    plan: Plan | None = None,
    more: Iterable[Event] = (),
    **changes: Any,
) -> CardState:
    """State of a run of 400 steps after ``steps`` of them and the events ``more``."""
    plan = plan or make_plan({}, "kubernetes" if on_gpus else "local")
    ranks = plan.layout.processes_per_node
    run = RunState(plan, total_steps=400)
    for event in (*events(steps=steps, ranks=ranks, on_gpus=on_gpus, started=STARTED), *more):
        run.add(event)
    gpus = tuple(
        GpuMeasured(
            index=i,
            name="NVIDIA A100-SXM4-80GB",
            total_bytes=80 * GIB,
            start_used_bytes=GIB // 2,
            peak_used_bytes=33 * GIB,
            mean_utilization=0.97,
            peak_power_watts=390.0,
            peak_temperature_celsius=64,
        )
        for i in range(ranks if on_gpus and nvml else 0)
    )
    measured = Measured(
        step="train",
        node=0,
        host="node-0",
        duration_seconds=260.0,
        samples=260,
        sampling_seconds=0.5,
        gpus=gpus,
        ranks=run.ranks,
        host_total_bytes=1000 * GIB,
        host_rss_peak_bytes=88 * GIB,
        host_pss_peak_bytes=61 * GIB,
        mean_cpu_cores=9.4,
        shared_memory_peak_bytes=2 * GIB,
        disk_free_min_bytes=400 * GIB,
        steps=run.last_step,
        tokens_per_second=run.tokens_per_second,
        mfu=run.mfu,
        usd=2.96 if on_gpus else None,
        notes=() if gpus else ("No NVIDIA GPU on this machine: only host memory is measured.",),
    )
    gpu_samples = tuple(
        GpusSample(
            at=STARTED + second,
            gpus=tuple(
                GpuSample(
                    used_bytes=min(second + 1, 33) * GIB,
                    utilization=0.97,
                    power_watts=380.0,
                    temperature_celsius=60,
                )
                for _ in gpus
            ),
        )
        for second in range(260 if gpus else 0)
    )
    host_samples = tuple(
        HostSample(
            at=STARTED + second,
            rss_bytes=60 * GIB,
            pss_bytes=None,
            used_bytes=70 * GIB,
            shared_memory_bytes=GIB,
            disk_free_bytes=400 * GIB,
        )
        for second in range(260)
    )
    values: dict[str, Any] = {
        "run": run,
        "measured": measured,
        "gpu_samples": gpu_samples,
        "host_samples": host_samples,
        "started": STARTED,
        "ended": None,
        "failed": None,
    }
    return CardState(**(values | changes))
