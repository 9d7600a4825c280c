"""What is computed once before training, by all nodes together, in parts that outlive any of them.

Each node computes some of the parts, in a process of its own; a part that is there is not computed again,
whichever run has left it: parts lie in the run's store, under a name of what they were computed of.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
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
) -> list[Path]:
    """Have all parts computed, by all nodes together; returns their files, in ``work``.

    Parameters
    ----------
    request:
        What the process is given, as JSON; with ``parts``, ``count`` and ``out``.
    limit_s:
        In which a part has to come, of this node or another; for the first part four times as long, as the
        model has to be loaded.

    Raises UserError where the computation fails or does not get on, RankFailed where a signal has ended it.
    """
    mine = [part for part in parts.numbers if part % address.nodes == address.node]
    missing = [part for part in mine if store.size(parts.key(part)) is None]
    found = len(mine) - len(missing)
    if found:
        print(f"{parts.name}: {found} of {len(mine)} parts are there already", flush=True)
    work.mkdir(parents=True, exist_ok=True)
    if missing:
        values = {**request, "parts": missing, "count": parts.count, "out": str(work)}
        (work / "request.json").write_text(json.dumps(values))
        _compute(parts, missing, address.node, store, work, on_cpu=on_cpu, limit_s=limit_s)
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
    parts: Parts, missing: list[int], node: int, store: Storage, work: Path, *, on_cpu: bool, limit_s: float
) -> None:
    """Compute parts in a process of its own, and store each when it is there."""
    log, heard, waiting = work / f"{parts.name}.log", time.monotonic(), list(missing)
    with started(parts.module, work / "request.json", log, on_cpu=on_cpu) as process:
        while waiting:
            ended = process.poll() is not None
            path = work / parts.file(waiting[0])
            if path.is_file():
                store.put_file(parts.key(waiting.pop(0)), path)
                heard = time.monotonic()
                done = len(missing) - len(waiting)
                of_all = f"{done} of {len(missing)} parts of {parts.size} ({parts.count:,} in all)"
                print(f"{parts.name}: {of_all}", flush=True)
            elif ended and process.returncode < 0:
                raise RankFailed(_killed(parts.name, node, process.returncode, tail(log, 30)))
            elif ended:
                why = tail(log, 1) or f"exit status {process.returncode}"
                raise UserError(f"The {parts.name} could not be computed: {why}", f"Its log: {tail(log, 30)}")
            elif time.monotonic() - heard > limit_s * (LOADING if waiting == missing else 1):
                raise UserError(
                    f"The {parts.name} has not got on for {limit_s} s.",
                    "Raise resources.hang_timeout_s if the model is that slow here.",
                )
            else:
                _wait(process)


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


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=_LOOK_S)
    except subprocess.TimeoutExpired:
        return


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
