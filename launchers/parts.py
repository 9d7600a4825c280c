"""What is computed once before training, by all nodes together, in parts that outlive any of them.

Each node computes some of the parts, in a process of its own or one for each of its GPUs; a part that is
there is not computed again, whichever run has left it: parts lie in the run's store, under a name of what
they were computed of.
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
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.processes import started, tail
from launchers.gang.failures import LOG_END, Failure, RankFailed
from launchers.gang.watch import signal_name
from launchers.store.bundles import Storage

LOADING = 4  # times the limit for the first sign of a model that is being loaded
_LOOK_S = 0.5
_READ = 2**20  # of each weight file's beginning and end, to tell models apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Items that are computed ``size`` at a time; each part is a file."""

    name: str  # of the whole, for people and for keys in the store
    module: str  # whose main computes parts: python -m MODULE REQUEST
    fingerprint: str  # of all that decides the content
    count: int  # items
    size: int  # items of a part
    suffix: str  # of a part's file

    @property
    def numbers(self) -> range:
        """The parts."""
        return range(-(-self.count // self.size))

    def file(self, part: int) -> str:
        """The name of a part's file."""
        return f"part-{part:05d}{self.suffix}"

    def key(self, part: int) -> str:
        """Where a part lies in the store."""
        return f"{self.name}/{self.fingerprint}/{self.file(part)}"

    def items(self, part: int) -> range:
        """The items of a part."""
        return range(part * self.size, min((part + 1) * self.size, self.count))


def fetch(
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
    """Have all parts computed, by all nodes together; returns their files, in ``work``.

    Parameters
    ----------
    request:
        What the process is given, as JSON; with ``parts``, ``count`` and ``out``.
    limit_s:
        In which a part has to come, of this node or another; for the first part four times as long, as the
        model has to be loaded.
    processes:
        Of this node; several see one GPU each, one sees all.

    Raises UserError where the computation fails or does not get on, RankFailed where a signal has ended it.
    """
    mine = [part for part in parts.numbers if part % address.nodes == address.node]
    missing = [part for part in mine if store.size(parts.key(part)) is None]
    found = len(mine) - len(missing)
    if found:
        print(f"{parts.name}: {found} of {len(mine)} parts are there already", flush=True)
    work.mkdir(parents=True, exist_ok=True)
    if missing:
        shares = [missing[first::processes] for first in range(min(processes, len(missing)))]
        for number, share in enumerate(shares):
            values = {**request, "parts": share, "count": parts.count, "out": str(work)}
            (work / f"request-{number}.json").write_text(json.dumps(values))
        _compute(parts, shares, address.node, store, work, on_cpu=on_cpu, limit_s=limit_s)
    return _gathered(parts, store, work, limit_s=LOADING * limit_s)


def fingerprint(texts: Iterable[str], files: Iterable[Path]) -> str:
    """Of texts, and of files by name, size, beginning and end."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_READ))
            file.seek(max(0, size - _READ))
            digest.update(file.read(_READ))
    return digest.hexdigest()[:32]


def _compute(
    parts: Parts,
    shares: list[list[int]],
    node: int,
    store: Storage,
    work: Path,
    *,
    on_cpu: bool,
    limit_s: float,
) -> None:
    """Compute parts, each share in a process of its own, and store each part when it is there."""
    of_all, done, heard = sum(map(len, shares)), 0, time.monotonic()
    logs = [work / f"{parts.name}-{number}.log" for number in range(len(shares))]
    with ExitStack() as stack:
        waiting = []
        for number, (share, log) in enumerate(zip(shares, logs, strict=True)):
            request, gpu = work / f"request-{number}.json", number if len(shares) > 1 else None
            process = stack.enter_context(started(parts.module, request, log, on_cpu=on_cpu, gpu=gpu))
            waiting.append((process, log, list(share)))
        while any(rest for *_, rest in waiting):
            ended = [process.poll() is not None for process, *_ in waiting]
            found = [rest for *_, rest in waiting if rest and (work / parts.file(rest[0])).is_file()]
            for rest in found:
                store.put_file(parts.key(rest[0]), work / parts.file(rest.pop(0)))
                heard, done = time.monotonic(), done + 1
                line = f"{done} of {of_all} parts of {parts.size} ({parts.count:,} in all)"
                print(f"{parts.name}: {line}", flush=True)
            if found:
                continue
            for is_over, (process, log, rest) in zip(ended, waiting, strict=True):
                if is_over and rest:
                    raise _failed(parts.name, node, process.returncode, log)
            if time.monotonic() - heard > limit_s * (1 if done else LOADING):
                raise UserError(
                    f"The {parts.name} has not got on for {limit_s} s.",
                    "Raise resources.hang_timeout_s if the model is that slow here.",
                )
            time.sleep(_LOOK_S)


def _failed(name: str, node: int, status: int, log: Path) -> RankFailed | UserError:
    """Why a process that has left parts out has ended: by a signal, or by what its log says."""
    if status < 0:
        return RankFailed(_killed(name, node, status, tail(log, 30)))
    why = tail(log, 1) or f"exit status {status}"
    return UserError(f"The {name} could not be computed: {why}", f"Its log: {tail(log, 30)}")


def _killed(name: str, node: int, status: int, log: str) -> Failure:
    """A process that a signal has ended: nobody's mistake, so that the step is tried again."""
    return Failure(
        kind="rank",
        node=node,
        host=socket.gethostname(),
        at=time.time(),
        message=f"the process that computes the {name} was ended by {signal_name(-status)}",
        traceback=f"{LOG_END}log:\n{log}",
    )


def _gathered(parts: Parts, store: Storage, work: Path, *, limit_s: float) -> list[Path]:
    """All parts' files; waits for those of other nodes."""
    files, heard = [], time.monotonic()
    for part in parts.numbers:
        while store.size(parts.key(part)) is None:
            if time.monotonic() - heard > limit_s:
                raise UserError(
                    f"Another node has not computed its part of the {parts.name} for {limit_s} s.",
                    "Its own log says why.",
                )
            time.sleep(_LOOK_S)
        heard = time.monotonic()
        path = work / parts.file(part)
        if not path.is_file():
            store.get_file(parts.key(part), path)
        files.append(path)
    return files
