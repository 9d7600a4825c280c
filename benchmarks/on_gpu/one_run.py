"""Run one training through the launchers: ``python -m benchmarks.on_gpu.one_run ORDER PARENT_PID``.

Follows a user's run (launchers.run.preparation, launchers.gang) from its settings to the end of the last
step, and saves no model. The order and its outcome are JSON files.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.on_gpu import cases, limited
from decorators.profile.sampling import Sampler
from estimator.errors import UserError
from estimator.hardware.local_machine import detect
from estimator.job import Target
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.cluster.processes import die_with_parent
from launchers.dataset.prepared import Prepared
from launchers.gang.allocator import GENERAL_NAME, NAME
from launchers.gang.failures import GangFailed
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.models import weights
from launchers.report.metrics import median, tokens_of_steps
from launchers.report.state import RunState
from launchers.report.telemetry import Event, Phase
from launchers.run import checks, preparation
from launchers.settings import Settings

SAMPLE_S = 0.1  # interval between NVML samples, if sampling is cheap enough
Ended = Literal["ran", "out of memory", "failed", "refused", "no time"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Settings of a run, and the folders of its files."""

    settings: dict[str, Any]
    warm_up: int  # steps excluded from the speed
    folder: Path  # files of this run alone
    data: Path  # prepared rows, shared by runs with equal rows
    limit_bytes: int | None = None  # memory limit of each process

    def save(self) -> Path:
        """Write the order into its folder and return the path; :func:`result_of` is the outcome's."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "order.json"
        values = {name: getattr(self, name) for name in ("settings", "warm_up", "limit_bytes")}
        path.write_text(json.dumps(values | {"folder": str(self.folder), "data": str(self.data)}))
        return path

    @classmethod
    def load(cls, path: Path) -> Order:
        values = json.loads(path.read_text())
        return cls(**{**values, "folder": Path(values["folder"]), "data": Path(values["data"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """End of a run and its measurements; bytes of the largest process. None: unknown or not applicable."""

    ended: Ended
    message: str = ""  # why it did not run
    seconds: float = 0.0
    plan: str | None = None  # the plan's JSON
    limit_bytes: int | None = None
    live_bytes: int | None = None  # torch.cuda.max_memory_allocated
    reserved_bytes: int | None = None  # torch.cuda.max_memory_reserved
    resident_bytes: int | None = None  # host memory
    device_bytes: int | None = None  # NVML: the whole GPU, less what was in use before
    device_before_bytes: int | None = None
    device_total_bytes: int | None = None
    device_name: str = ""  # as NVML has it
    samples: int = 0  # NVML samples
    steps: int = 0
    step_seconds: float | None = None  # median of the steps after the warm-up
    tokens_per_second: float | None = None  # of one process, padding not counted; median as above
    notes: tuple[str, ...] = field(default=())  # what the sampler could not see

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        return cls(**{**values, "notes": tuple(values["notes"])})


class _Trained(Exception):  # noqa: N818 - the successful end, no error
    """Raised when all ranks have finished their last step."""


class _Reporter:
    """Adds telemetry of the ranks to the run's state, and ends the run after the last measurement."""

    def __init__(self, job: TrainJob) -> None:
        self._processes = job.plan.layout.processes_per_node
        self._state = RunState(job.plan, tokens_of_steps=tokens_of_steps(Prepared(job.data_dir)))
        self._saving: set[int] = set()

    def __call__(self, event: Event) -> None:
        self._state.add(event)
        if isinstance(event, Phase) and event.name == "save":
            self._saving.add(event.rank)
            if len(self._saving) == self._processes:
                raise _Trained

    def measured(self, warm_up: int) -> dict[str, Any]:
        """Return the measured fields of an Outcome."""
        steps, ranks = self._state.metrics, self._state.ranks
        return {
            "live_bytes": max((each.allocated_peak_bytes or 0 for each in ranks), default=0) or None,
            "reserved_bytes": max((each.reserved_peak_bytes or 0 for each in ranks), default=0) or None,
            "resident_bytes": max((each.rss_peak_bytes or 0 for each in ranks), default=0) or None,
            "steps": len(steps),
            "step_seconds": median([each.dt for each in steps[warm_up:]]),
            "tokens_per_second": median([each.tokens_per_second_per_gpu for each in steps[warm_up:]]),
        }


def run(order: Order) -> Outcome:
    """Run an order; every failure is an outcome, only bugs of this module raise."""
    start = time.monotonic()
    outcome = Outcome(ended="refused")
    try:
        job = prepare(order)
        outcome = _train(job, order)
    except UserError as error:
        outcome = dataclasses.replace(outcome, ended="refused", message=_one_line(error.problem))
    return dataclasses.replace(outcome, seconds=time.monotonic() - start, limit_bytes=order.limit_bytes)


def prepare(order: Order) -> TrainJob:
    settings = Settings.model_validate(order.settings)
    target = Target(machine=detect(order.folder))
    planned = preparation.plan_run(settings, target, calibrated=False, choose=cases.plan_anyway)
    checks.check_installed(planned.settings.engine, planned.settings.method)
    model_dir = weights.fetch(planned.model, order.folder)  # generated: no check, which imports transformers
    data_dir = order.data / _key(planned.settings)
    if not (data_dir / "info.json").exists():
        conversations, held_out = preparation.read_data(planned.settings, order.folder)
        preparation.tokenize(conversations, held_out, planned.settings, model_dir, data_dir)
    return TrainJob(
        plan=planned.plan,
        settings=planned.settings,
        model=planned.model,
        model_dir=model_dir,
        data_dir=data_dir,
        work_dir=order.folder / "node",
        total_steps=Prepared(data_dir).info.total_steps,
        reward=planned.settings.rl.reward,
    )


def _key(settings: Settings) -> str:
    """Return a key of all settings that prepared rows depend on."""
    names = (
        "model",
        "dataset",
        "task",
        "seq_len",
        "packing",
        "longest_first",
        "global_batch_size",
        "max_steps",
    )
    values = [getattr(settings, name) for name in names]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _train(job: TrainJob, order: Order) -> Outcome:
    for name in (NAME, GENERAL_NAME):  # the settings alone decide on the allocator
        os.environ.pop(name, None)
    os.environ.pop(limited.LIMIT, None)
    if order.limit_bytes is not None:
        os.environ[limited.LIMIT] = str(order.limit_bytes)
    reporter, sampler = _Reporter(job), Sampler(SAMPLE_S)
    address = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="on_gpu")
    ended: Ended = "ran"
    message = ""
    sampler.start()
    try:
        run_node(job, address, on_event=reporter, engine=limited.ENGINE)
    except _Trained:
        pass
    except GangFailed as error:
        ended = "out of memory" if error.failure.out_of_memory else "failed"
        message = _one_line(error.failure.message)
    finally:
        sampler.stop()
    return Outcome(
        ended=ended,
        message=message,
        plan=job.plan.to_json(),
        **reporter.measured(order.warm_up),
        **_device(sampler, job.plan.layout.processes_per_node),
    )


def _device(sampler: Sampler, processes: int) -> dict[str, Any]:
    """Return NVML's figures of the run's most used GPU."""
    with sampler.lock:
        samples, notes = sampler.samples, tuple(sampler.notes)
        gpus = list(zip(sampler.gpus, samples.gpu_start, samples.gpu_peak, strict=False))[:processes]
        if not gpus:
            return {"notes": notes}
        info, before, peak = max(gpus, key=lambda gpu: gpu[2] - gpu[1])
        return {
            "device_name": info.name,
            "device_total_bytes": info.total_bytes,
            "device_before_bytes": before,
            "device_bytes": peak - before,
            "samples": samples.gpus.count,
            "notes": notes,
        }


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def result_of(order: Path) -> Path:
    """Return the path of an order's outcome."""
    return order.with_name("outcome.json")


def execute(measure: Callable[[Order], Outcome], description: str | None) -> None:
    """Measure the order named on the command line and write its outcome; ends with its parent process."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("order", type=Path, metavar="ORDER", help="JSON file")
    parser.add_argument("parent", type=int, metavar="PARENT_PID", help="process that started this one")
    options = parser.parse_args()
    die_with_parent(options.parent, signal.SIGTERM)  # on which the run ends its ranks in order
    outcome = measure(Order.load(options.order))
    temporary = result_of(options.order).with_suffix(".tmp")
    temporary.write_text(json.dumps(outcome.to_dict()))
    temporary.rename(result_of(options.order))


if __name__ == "__main__":
    execute(run, __doc__)
