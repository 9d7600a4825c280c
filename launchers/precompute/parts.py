"""Precomputation before training, divided into parts that all nodes share.

Each node computes some of the parts, in one process or in one process per GPU. A part's key in the store
contains a fingerprint of its inputs, so parts of earlier runs with equal inputs are reused.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.terminal import print
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.processes import started, tail
from launchers.gang.failures import LOG_END, Failure, RankFailed
from launchers.gang.watch import signal_name
from launchers.store.bundles import Storage

LOADING_FACTOR = 4  # the time limit of the first part is longer, as it includes loading the model
_POLL_S = 0.5
_HASHED_BYTES = 2**20  # hashed at the beginning and the end of each weight file


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Division of ``count`` items into parts of ``size`` items; each part is one file."""

    name: str  # for messages and keys of the store
    module: str  # module that computes parts, run as python -m MODULE REQUEST_FILE
    fingerprint: str  # hash of every input of the computation
    count: int  # number of items
    size: int  # items per part
    suffix: str  # suffix of a part's file name

    @property
    def numbers(self) -> range:
        """Numbers of the parts."""
        return range(-(-self.count // self.size))

    def file(self, part: int) -> str:
        """Return the file name of a part."""
        return f"part-{part:05d}{self.suffix}"

    def key(self, part: int) -> str:
        """Return the key of a part in the store."""
        return f"{self.name}/{self.fingerprint}/{self.file(part)}"


def compute_all(
    parts: Parts,
    request: Mapping[str, Any],
    address: NodeAddress,
    store: Storage,
    work: Path,
    *,
    on_cpu: bool,
    limit_s: float,
    processes: int = 1,
) -> list[Path]:
    """Compute this node's missing parts, wait for those of other nodes, and return all files in ``work``.

    Parameters
    ----------
    request:
        Input of the computing processes, written as JSON with ``parts``, ``count`` and ``out`` added.
    limit_s:
        Maximum time between two parts; four times as long for the first part, which includes loading the
        model, and for parts of other nodes.
    processes:
        Number of processes on this node. Each of several processes gets one GPU, a single one all GPUs.

    Raises UserError if the computation fails or makes no progress, RankFailed if a signal ended it.
    """
    node_parts = [part for part in parts.numbers if part % address.nodes == address.node]
    missing = [part for part in node_parts if store.size(parts.key(part)) is None]
    stored = len(node_parts) - len(missing)
    if stored:
        print(f"{parts.name}: {stored} of {len(node_parts)} parts are already stored", flush=True)
    work.mkdir(parents=True, exist_ok=True)
    if missing:
        shares = [missing[first::processes] for first in range(min(processes, len(missing)))]
        for number, share in enumerate(shares):
            values = {**request, "parts": share, "count": parts.count, "out": str(work)}
            (work / f"request-{number}.json").write_text(json.dumps(values))
        _run_processes(parts, shares, address.node, store, work, on_cpu=on_cpu, limit_s=limit_s)
    return _gather(parts, store, work, limit_s=LOADING_FACTOR * limit_s)


def fingerprint(texts: Iterable[str], files: Iterable[Path]) -> str:
    """Hash texts, and files by name, size, first and last MiB."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()[:32]


def _run_processes(
    parts: Parts,
    shares: list[list[int]],
    node: int,
    store: Storage,
    work: Path,
    *,
    on_cpu: bool,
    limit_s: float,
) -> None:
    """Compute each share of parts in a separate process; store each part as soon as its file exists."""
    total, parts_done, last_progress = sum(map(len, shares)), 0, time.monotonic()
    logs = [work / f"{parts.name}-{number}.log" for number in range(len(shares))]
    with ExitStack() as stack:
        workers = []
        for number, (share, log) in enumerate(zip(shares, logs, strict=True)):
            request, gpu = work / f"request-{number}.json", number if len(shares) > 1 else None
            process = stack.enter_context(started(parts.module, request, log, on_cpu=on_cpu, gpu=gpu))
            workers.append((process, log, list(share)))
        while any(pending for *_, pending in workers):
            statuses = [process.poll() is not None for process, *_ in workers]
            ready = [
                pending for *_, pending in workers if pending and (work / parts.file(pending[0])).is_file()
            ]
            for pending in ready:
                store.put_file(parts.key(pending[0]), work / parts.file(pending.pop(0)))
                last_progress, parts_done = time.monotonic(), parts_done + 1
                progress = f"{parts_done} of {total} parts of {parts.size} ({parts.count:,} in all)"
                print(f"{parts.name}: {progress}", flush=True)
            if ready:
                continue
            for exited, (process, log, pending) in zip(statuses, workers, strict=True):
                if exited and pending:
                    raise _error(parts.name, node, process.returncode, log)
            if time.monotonic() - last_progress > limit_s * (1 if parts_done else LOADING_FACTOR):
                raise UserError(
                    f"Computing the {parts.name} has made no progress for {limit_s} s.",
                    "Raise resources.hang_timeout_s if the model is that slow on this hardware.",
                )
            time.sleep(_POLL_S)


def _error(name: str, node: int, status: int, log: Path) -> RankFailed | UserError:
    """Build the error for a process that ended early: RankFailed after a signal, which is retried."""
    if status >= 0:
        reason = tail(log, 1) or f"exit status {status}"
        return UserError(f"The {name} could not be computed: {reason}", f"Its log: {tail(log, 30)}")
    return RankFailed(
        Failure(
            kind="rank",
            node=node,
            host=socket.gethostname(),
            at=time.time(),
            message=f"the process that computes the {name} was ended by {signal_name(-status)}",
            traceback=f"{LOG_END}log:\n{tail(log, 30)}",
        )
    )


def _gather(parts: Parts, store: Storage, work: Path, *, limit_s: float) -> list[Path]:
    """Wait for parts of other nodes, and return the files of all parts."""
    files, last_progress = [], time.monotonic()
    for part in parts.numbers:
        while store.size(parts.key(part)) is None:
            if time.monotonic() - last_progress > limit_s:
                raise UserError(
                    f"Another node has not finished its part of the {parts.name} within {limit_s} s.",
                    "See the log of that node for the reason.",
                )
            time.sleep(_POLL_S)
        last_progress = time.monotonic()
        path = work / parts.file(part)
        if not path.is_file():
            store.get_file(parts.key(part), path)
        files.append(path)
    return files
