"""Reader of torch's flight recorder: the last collective started by each rank, and whether it still waits.

The recorder numbers a group's collectives equally on all ranks, so the rank with the lowest number blocks the
others. The recorded state is useless with gloo, where it stays "scheduled"; the retired flag is reliable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]  # sequence, operation, waits, size: plain values for the control channel
# Private to torch, so each may be missing: NCCL's own recorder, and the one of all backends (since 2.9)
_DUMPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("_dump_nccl_trace_json", (True, False)),
    ("_dump_fr_trace_json", ()),
)


def read() -> Record | None:
    """Read this process's last collective; None without a recorder or entries."""
    if "torch" not in sys.modules:
        return None
    return next(filter(None, (_dumped(name, arguments) for name, arguments in _DUMPS)), None)


def _dumped(name: str, arguments: tuple[Any, ...]) -> Record | None:
    try:
        import torch

        dump = getattr(torch._C._distributed_c10d, name)
        return newest_entry(json.loads(dump(*arguments)))
    except Exception:  # noqa: BLE001 - private API in an unknown format; optional, so never a failure
        return None


def newest_entry(trace: Mapping[str, Any]) -> Record | None:
    """Return the newest collective of a dump, without sends and receives, which are numbered per pair."""
    entries = [entry for entry in trace.get("entries", ()) if not entry.get("is_p2p")]
    if not entries:
        return None
    entry = max(entries, key=lambda entry: entry["record_id"])
    shapes = entry.get("input_sizes") or []
    kinds = entry.get("input_dtypes") or []
    size = ", ".join(
        f"{'x'.join(map(str, shape))} {kind}" for shape, kind in zip(shapes, kinds, strict=False)
    )
    return {
        "sequence": int(entry["collective_seq_id"]),
        "operation": str(entry["profiling_name"]),
        "waits": not entry.get("retired", False),
        "size": size,
    }


def lagging(records: Mapping[int, Record]) -> list[int]:
    """Return ranks whose newest collective is older than that of others; empty if all are equal."""
    if not records:
        return []
    newest = max(record["sequence"] for record in records.values())
    ranks = sorted(rank for rank, record in records.items() if record["sequence"] < newest)
    return ranks if len(ranks) < len(records) else []


def describe(records: Mapping[int, Record], culprit: int) -> str | None:
    """Describe the position of the blocking rank and of the waiting ranks; None without records."""
    ranks_by_call: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank != culprit and record["waits"]:
            ranks_by_call.setdefault(_collective(record), []).append(rank)
    parts = []
    if culprit in records:
        record = records[culprit]
        parts.append(f"it {'waits in' if record['waits'] else 'has ended'} {_collective(record)}")
    parts += [f"rank {', '.join(map(str, ranks[:8]))} in {where}" for where, ranks in ranks_by_call.items()]
    return f"flight recorder: {'; '.join(parts)}" if parts else None


def _collective(record: Record) -> str:
    size = f" of {record['size']}" if record["size"] else ""
    return f"collective {record['sequence']}, {record['operation']}{size}"
