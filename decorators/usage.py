"""Usage records of a flow's tasks in its datastore: written by profiled tasks, read by right-sizing.

A record is stored at ``finetune-usage/flows/FLOW/STEP/TIME-RUN-TASK-ATTEMPT.json``. The requested sizes of
the steps reach their tasks in the environment variable ``FINETUNE_SIZES``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from decorators import _metaflow
from decorators._metaflow import StepView
from decorators.profile.measured import Measured
from decorators.storage import MetaflowStorage
from estimator.plan import MIB
from estimator.rightsizing.usage import Ending, Sizes, Usage
from launchers.gang.failures import GangFailed
from launchers.store.bundles import Storage

if TYPE_CHECKING:
    from estimator.rightsizing.recommend import Recommendation

SIZES_VARIABLE = "FINETUNE_SIZES"  # JSON: step -> its requested sizes
PARAMETERS_VARIABLE = "FINETUNE_PARAMETERS"  # JSON: parameter -> number or digest, in the launching process
FIRST_RECORD_S = 10.0  # time after which a running task stores its first record
RECORD_S = 60.0  # interval between records
MOST_RECORDS = 60  # of a step that are read, the newest
_GPU_MEMORY = re.compile(r"CUDA|HIP|GPU|torch\.(cuda\.)?OutOfMemoryError|CUBLAS")
_MB = 10**6
_FLOWS = "flows"  # prefix of all keys
_log = logging.getLogger(__name__)


def usage_storage() -> MetaflowStorage:
    """Return the storage of all flows' usage records in the running flow's datastore."""
    return MetaflowStorage(_metaflow.storage(), "finetune-usage")


def configured_usage_storage() -> MetaflowStorage:
    """Return the storage of all flows' usage records in Metaflow's configured datastore, outside of a run."""
    return MetaflowStorage(_metaflow.configured_storage(), "finetune-usage")


def key_of(usage: Usage) -> str:
    """Return the key of a record; keys of one step sort by time."""
    name = f"{int(usage.at * 1000):013d}-{usage.run}-{usage.task}-{usage.attempt}.json"
    return f"{_FLOWS}/{usage.flow}/{usage.step}/{name}"


def read_history(storage: Storage, flow: str, step: str, limit: int = MOST_RECORDS) -> list[Usage]:
    """Read the newest records of a step, oldest first; records of other versions are left out."""
    records = []
    for key in storage.keys(f"{_FLOWS}/{flow}/{step}")[-limit:]:
        try:
            records.append(Usage.from_json(storage.get_bytes(key).decode()))
        except (FileNotFoundError, ValueError) as error:  # noqa: PERF203 - each is a separate request
            _log.debug("Not read: %s: %s", key, error)
    return records


def steps_with_records(storage: Storage) -> list[tuple[str, str]]:
    """Return (flow, step) of all records, in order."""
    parts = [key.split("/") for key in storage.keys(_FLOWS)]
    return sorted({(names[1], names[2]) for names in parts if len(names) == 4})


def digest_parameters(values: Mapping[str, Any]) -> dict[str, str]:
    """Return parameters in a comparable form without secrets: numbers, and digests of other values."""
    digests = {}
    for name, value in values.items():
        if isinstance(value, bool | int | float) or value is None:
            digests[name] = f"{value:g}" if isinstance(value, float) else str(value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
            digests[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return digests


def sizes_of_step(step: StepView) -> Sizes:
    """Return the sizes that a step's decorators request now, merged as Metaflow merges them."""
    backend = step.backend()
    compute = step.values(backend) if backend != "local" else {}
    resources = step.values("resources")
    gpu = _largest("gpu", compute, resources)
    memory = _largest("memory", compute, resources)
    if memory is not None and backend == "kubernetes":
        memory = memory * _MB / MIB
    return Sizes(
        cpu=_largest("cpu", compute, resources),
        memory_mib=None if memory is None else round(memory),
        gpus=None if gpu is None else int(gpu),
    )


def _largest(name: str, *tables: Mapping[str, Any]) -> float | None:
    numbers = []
    for table in tables:
        try:
            numbers.append(float(table[name]))
        except (KeyError, TypeError, ValueError):  # noqa: PERF203
            continue  # not given, or a value that Metaflow refuses itself
    return max(numbers, default=None)


def set_sizes(step: str, sizes: Sizes) -> None:
    """Store a step's requested sizes for its tasks, in this process's environment."""
    os.environ[SIZES_VARIABLE] = json.dumps({**_all_sizes(), step: asdict(sizes)})


def requested_sizes(step: str) -> Sizes:
    """Return the sizes that were requested for a step; all None if nothing is known."""
    return Sizes(**_all_sizes().get(step, {}))


def sizes_variable(step: str) -> dict[str, str]:
    """Return the variable that carries a step's own sizes to its container."""
    sizes = _all_sizes().get(step)
    return {} if sizes is None else {SIZES_VARIABLE: json.dumps({step: sizes})}


def _all_sizes() -> dict[str, Any]:
    sizes: dict[str, Any] = json.loads(os.environ.get(SIZES_VARIABLE) or "{}")
    return sizes


def ending_of(exception: BaseException | None) -> Ending:
    """Return how a task ended by its exception."""
    if exception is None:
        return "succeeded"
    text = f"{type(exception).__module__}.{type(exception).__name__}: {exception}"
    out_of_memory = isinstance(exception, MemoryError) or "OutOfMemoryError" in type(exception).__name__
    if isinstance(exception, GangFailed):
        out_of_memory = exception.failure.out_of_memory
    if not out_of_memory:
        return "failed"
    return "out of GPU memory" if _GPU_MEMORY.search(text) else "out of memory"


class UsageRecorder:
    """Keeps the usage record of one task: after some seconds, once a minute, and when the task ends.

    Parameters
    ----------
    identity:
        flow, step, run, task and attempt.
    parameters:
        The run's parameters, by :func:`digest_parameters`.
    """

    def __init__(self, identity: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
        self._identity, self._parameters = dict(identity), tuple(parameters.items())
        self.requested = requested_sizes(self._identity["step"])
        self._at = time.time()
        self._history: list[Usage] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, measured: Any) -> None:
        """Record at intervals what ``measured()`` returns."""
        self._thread = threading.Thread(
            target=self._keep, args=(measured,), name="gpu-profile-usage", daemon=True
        )
        self._thread.start()

    def stop(self, measured: Measured, exception: BaseException | None) -> None:
        """Keep the last record."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(5)
        keep(self._usage(measured, ending_of(exception)))

    def read_history(self) -> None:
        """Read the records of earlier tasks of the step, for :meth:`next_request`."""
        identity = self._identity
        earlier = with_killed(read_history(usage_storage(), identity["flow"], identity["step"]), time.time())
        own = (identity["run"], identity["task"])
        self._history = [usage for usage in earlier if (usage.run, usage.task) != own]

    def next_request(self, measured: Measured, ending: Ending) -> Recommendation | None:
        """Return what right-sizing would request next if the task ended like this."""
        from estimator.rightsizing.recommend import recommend

        return recommend([*self._history, self._usage(measured, ending)], dict(self._parameters))

    def _keep(self, measured: Any) -> None:
        pause = FIRST_RECORD_S
        while not self._ended.wait(pause):
            keep(self._usage(measured(), "running"))
            pause = RECORD_S

    def _usage(self, measured: Measured, ending: Ending) -> Usage:
        return Usage(
            **self._identity,
            at=self._at,
            seconds=measured.duration_seconds,
            ending=ending,
            requested=self.requested,
            parameters=self._parameters,
            memory_bytes=measured.host_peak_bytes,
            cpu=measured.busy_cpu_cores,
            gpus=measured.gpu_usage,
        )


def keep(usage: Usage) -> None:
    """Write a record; an error of the datastore never breaks a step."""
    try:
        usage_storage().put_bytes(key_of(usage), usage.to_json().encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may raise
        _log.info("The usage of %s/%s could not be stored: %s", usage.step, usage.task, error)


def note_kill(run: str, step: str, task: str, attempt: int) -> None:
    """Record that a task's container was ended for lack of memory, in the process that waited for it."""
    storage, flow = usage_storage(), _metaflow.flow_name()
    suffix = f"-{run}-{task}-{attempt}.json"
    record_key = next((key for key in storage.keys(f"{_FLOWS}/{flow}/{step}") if key.endswith(suffix)), None)
    requested = requested_sizes(step)
    usage = Usage.from_json(storage.get_bytes(record_key).decode()) if record_key is not None else None
    limit = (requested.memory_mib or 0) * MIB
    parameters = json.loads(os.environ.get(PARAMETERS_VARIABLE) or "{}")
    keep(
        Usage(
            flow=flow,
            step=step,
            run=run,
            task=task,
            attempt=attempt,
            at=usage.at if usage is not None else time.time(),
            seconds=usage.seconds if usage is not None else 0.0,
            ending="out of memory",
            requested=requested,
            parameters=usage.parameters if usage is not None else tuple(parameters.items()),
            memory_bytes=max(limit, (usage.memory_bytes or 0) if usage is not None else 0) or None,
            cpu=usage.cpu if usage is not None else None,
            gpus=usage.gpus if usage is not None else (),
        )
    )


def with_killed(history: Sequence[Usage], now: float) -> list[Usage]:
    """Return the history with tasks that were killed at their memory limit counted as out of memory.

    The last record of a killed task has the ending "running"; other such records are omitted.
    """
    result = []
    for usage in history:
        if usage.ending != "running":
            result.append(usage)
        elif now - usage.at - usage.seconds > 2 * RECORD_S and _at_limit(usage):
            result.append(replace(usage, ending="out of memory"))
    return result


def _at_limit(usage: Usage) -> bool:
    limit = (usage.requested.memory_mib or 0) * MIB
    return bool(limit) and (usage.memory_bytes or 0) >= 0.9 * limit
