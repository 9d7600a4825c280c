"""Failures that end a gang, as nodes report them to each other, and the errors that run_node raises."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from estimator.errors import UserError
from estimator.formatting import printable

Kind = Literal["rank", "agent", "node", "left", "hang", "task", "user"]

# Errors of a healthy rank after its peer has failed: consequences, not causes
_SECONDARY = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|socket closed|closed by peer"
    r"|application timeout caused pair closure|gloo/transport|ncclRemoteError|ncclSystemError"
    r"|remote process exited|NCCL communicator was aborted|DistNetworkError|TCPStore|DistStoreError",
    re.IGNORECASE,
)

# Errors of torch for GPU memory (torch.OutOfMemoryError) and host memory (c10's CPU allocator), and of Python
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: can't allocate|^MemoryError"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)


LOG_END = "The end of its "  # prefix of a log excerpt that replaces a traceback


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One failure on one node, as sent between the nodes."""

    kind: Kind
    node: int
    host: str
    at: float  # seconds since the epoch, by the clock of that node
    message: str  # one line
    rank: int | None = None
    traceback: str = ""  # traceback of the rank, or the end of its log
    advice: str = ""  # kind "user": advice for the user
    secondary: bool = False  # probably the consequence of another failure
    out_of_memory: bool = False  # GPU or host memory

    @classmethod
    def now(cls, kind: Kind, node: int, host: str, message: str, **details: Any) -> Failure:
        """Describe a failure that is noticed now; ``details``: the other fields."""
        return cls(kind=kind, node=node, host=host, at=time.time(), message=message, **details)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Failure:
        return cls(**values)

    @classmethod
    def of_rank(cls, path: Path, *, node: int, host: str) -> Failure | None:
        """Read errors/rank-NNNNN.json (launchers.gang.rank.write_error); None if absent or incomplete."""
        try:
            values = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        rank, user, message = int(values["rank"]), values.get("user"), values["message"]
        source: dict[str, Any] = {"node": node, "host": host, "at": values["at"], "rank": rank}
        if user:
            return cls(kind="user", message=user["problem"], advice=user["advice"], **source)
        return cls(
            kind="rank",
            message=f"rank {rank} on {host} failed: {message}",
            traceback=values["traceback"],
            secondary=bool(_SECONDARY.search(message)),
            out_of_memory=bool(_OUT_OF_MEMORY.search(message)),
            **source,
        )

    def error(self) -> Exception:
        """Build the exception that every node raises for this failure."""
        if self.kind == "user":
            return UserError(self.message, self.advice)
        kinds = {
            "node": NodeLost,
            "left": NodeLeft,
            "hang": RankHung,
            "rank": RankFailed,
            "agent": RankFailed,
        }
        return kinds.get(self.kind, GangFailed)(self)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure, preferring causes over consequences and user errors over the rest.

    A full disk on one node fails the checkpoint on all nodes, and another node may be the first to report it.
    """
    return min(failures, key=lambda failure: (failure.secondary, failure.kind != "user", failure.at))


class GangFailed(RuntimeError):  # noqa: N818 named for the event
    """Error of a run that has ended on all nodes because of ``failure`` on one of them."""

    def __init__(self, failure: Failure) -> None:
        clock = datetime.fromtimestamp(failure.at).astimezone().strftime("%H:%M:%S")
        text = f"{failure.message} (node {failure.node}, {clock})"
        if failure.traceback:
            text += f"\n\n{failure.traceback.rstrip()}\n"
            if failure.traceback.startswith(LOG_END):  # unlike a traceback, a log need not end with the cause
                text += f"\n{failure.message}\n"
        super().__init__(printable(text))  # Metaflow prints it, and ranks raise what files contain
        self.failure = failure

    def __reduce__(self) -> tuple[type[GangFailed], tuple[Failure]]:
        return type(self), (self.failure,)


class RankFailed(GangFailed):
    """A training process raised, or was ended by a signal; the text contains its traceback."""


class RankHung(GangFailed):
    """A training process gave no sign of life for ``resources.hang_timeout_s``."""


class NodeLost(GangFailed):
    """A node was lost or stopped without a failure of its processes."""


class NodeLeft(NodeLost):
    """A node had to leave, after all nodes had stored a checkpoint."""
