"""CardStates for the tests of the card."""

from __future__ import annotations

from typing import Any

from decorators.profile.history import CardState, History
from decorators.profile.measured import GpuMeasured, Measured, RankMeasured
from decorators.profile.sampling import GpuSample, GpusSample, HostSample
from estimator.plan import Plan
from tests.decorators.flows.plans import make_plan
from tests.decorators.flows.synthetic import events

GIB = 2**30
STARTED = 1_000_000.0


def make_state(
    *, steps: int = 120, on_gpus: bool = True, nvml: bool = True, plan: Plan | None = None, **changes: Any
) -> CardState:
    """A run of 400 steps, ``steps`` of them done."""
    plan = plan or make_plan({}, "kubernetes" if on_gpus else "local")
    ranks = plan.layout.processes_per_node
    history = History(plan=plan, total_steps=400)
    for event in events(steps=steps, ranks=ranks, on_gpus=on_gpus, started=STARTED):
        history.add(event)
    rows = tuple(history.ranks())
    gpus = tuple(
        GpuMeasured(
            index=i,
            name="NVIDIA A100-SXM4-80GB",
            total_bytes=80 * GIB,
            start_used_bytes=GIB // 2,
            peak_used_bytes=33 * GIB,
            mean_utilisation=0.97,
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
        ranks=tuple(
            RankMeasured(
                rank=row.rank,
                host="node-0",
                device=row.info.device if row.info else "",
                allocated_peak_bytes=row.memory.allocated_peak if row.memory else None,
                reserved_peak_bytes=row.memory.reserved_peak if row.memory else None,
                rss_peak_bytes=row.memory.rss_peak if row.memory else None,
                tokens_per_second=row.tokens_per_second,
            )
            for row in rows
        ),
        host_total_bytes=1000 * GIB,
        host_rss_peak_bytes=88 * GIB,
        host_pss_peak_bytes=61 * GIB,
        mean_cpu_cores=9.4,
        shared_memory_peak_bytes=2 * GIB,
        disk_free_min_bytes=400 * GIB,
        steps=history.last_step,
        tokens_per_second=history.tokens_per_second(),
        mfu=history.mfu(),
        usd=2.96 if on_gpus else None,
        notes=() if gpus else ("No NVIDIA GPU on this machine: only host memory is measured.",),
    )
    gpu_samples = tuple(
        GpusSample(
            at=STARTED + second,
            gpus=tuple(
                GpuSample(
                    used_bytes=min(second + 1, 33) * GIB,
                    utilisation=0.97,
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
        "plan": plan,
        "measured": measured,
        "steps": tuple(history.steps()),
        "ranks": rows,
        "memory": tuple(history.memory_series),
        "gpu_samples": gpu_samples,
        "host_samples": host_samples,
        "total_steps": 400,
        "eta_seconds": history.eta_seconds(),
        "phase": "train",
        "started": STARTED,
        "ended": None,
        "failed": None,
    }
    return CardState(**(values | changes))
