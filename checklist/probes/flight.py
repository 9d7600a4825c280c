"""torch's flight recorder: which collective each rank began last, and whether it still waits in it.

The recorder numbers a group's collectives alike on all ranks, so whoever has the lowest number holds the
others up. Its state is no help over gloo, where it stays "scheduled"; whether an entry is retired is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

Record = dict[str, Any]  # sequence, operation, waits, size: plain, as it goes through the control channel
# Private to torch, so each may be missing: NCCL's own recorder, and the one of all backends (since 2.9)
_DUMPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("_dump_nccl_trace_json", (True, False)),
    ("_dump_fr_trace_json", ()),
)


def read() -> Record | None:
    """This process's last collective; None where there is no recorder, or nothing in it."""
    if "torch" not in sys.modules:
        return None
    return next(filter(None, (_dumped(name, arguments) for name, arguments in _DUMPS)), None)


def _dumped(name: str, arguments: tuple[Any, ...]) -> Record | None:
    try:
        import torch

        dump = getattr(torch._C._distributed_c10d, name)
        return last(json.loads(dump(*arguments)))
    except Exception:  # noqa: BLE001 - another form, another signature: an extra, never a failure
        return None


def last(trace: Mapping[str, Any]) -> Record | None:
    """The newest collective of a dump; sends and receives are numbered for each pair and left out."""
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


def behind(records: Mapping[int, Record]) -> list[int]:
    """Ranks whose newest collective is older than others'; none where all are alike."""
    if not records:
        return []
    newest = max(record["sequence"] for record in records.values())
    late = sorted(rank for rank, record in records.items() if record["sequence"] < newest)
    return late if len(late) < len(records) else []


def words(records: Mapping[int, Record], culprit: int) -> str | None:
    """Where the culprit and those who wait are, in a clause; None: no recorder told anything."""
    waiting: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank != culprit and record["waits"]:
            waiting.setdefault(_collective(record), []).append(rank)
    parts = []
    if culprit in records:
        record = records[culprit]
        parts.append(f"it {'waits in' if record['waits'] else 'has ended'} {_collective(record)}")
    parts += [f"rank {', '.join(map(str, ranks[:8]))} in {where}" for where, ranks in waiting.items()]
    return f"flight recorder: {'; '.join(parts)}" if parts else None


def _collective(record: Record) -> str:
    size = f" of {record['size']}" if record["size"] else ""
    return f"collective {record['sequence']}, {record['operation']}{size}"
