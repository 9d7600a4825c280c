"""Checkpoints of a run in a store: each is one unit that consists of one part per node.

Keys in the store::

    PREFIX/step-00000010.0/node-00000/   the part of node 0, a bundle       (".0": attempt 0 of the run)
    PREFIX/step-00000010.0/node-00001/
    PREFIX/step-00000010.0/checkpoint.json    written last, when all parts are stored

A new attempt writes under new keys, and never overwrites an earlier attempt's.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.store.bundles import DamagedError, Manifest, Storage, fetch_files, has_bundle, put_bundle

_COMMIT = "checkpoint.json"
_FOLDER = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    key: str
    step: int
    attempt: int
    nodes: int
    world_size: int
    at: float  # seconds since the epoch
    extra: Mapping[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """Checkpoints of one run, and of the runs it may resume from.

    Parameters
    ----------
    prefix:
        Key prefix under which this run writes, and searches first.
    attempt:
        Number of this attempt (Metaflow's retry count); the same on all nodes.
    origins:
        Prefixes of the runs that this one may resume from, nearest first. Only read.
    keep:
        Number of this run's newest committed checkpoints to keep.
    notes:
        ``notes(step)`` returns JSON values to add to a checkpoint's ``extra``; called at the commit, in the
        committing thread. Its ``"best_step"`` names a step whose checkpoint is kept too.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        attempt: int = 0,
        origins: Sequence[str] = (),
        keep: int = 2,
        notes: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        self._storage = storage
        self._prefix = prefix
        self._attempt = attempt
        self._origins = tuple(origins)
        self._keep = keep
        self._notes = notes

    def put_part(self, step: int, node: int, folder: Path) -> Manifest:
        """Store one node's files. Raises UserError if the store is full."""
        return put_bundle(self._storage, _part(self._key(step), node), folder)

    def commit(self, step: int, *, nodes: int, world_size: int, extra: Mapping[str, Any]) -> Checkpoint:
        """Commit a checkpoint on node 0 after every node has stored its part; then prune."""
        key = self._key(step)
        missing = [node for node in range(nodes) if not has_bundle(self._storage, _part(key, node))]
        if missing:
            raise RuntimeError(f"{self._storage.describe(key)}: the parts of nodes {missing} are missing")
        values: dict[str, Any] = {
            "step": step,
            "nodes": nodes,
            "world_size": world_size,
            "at": time.time(),
            "extra": {**extra, **(self._notes(step) if self._notes else {})},
        }
        self._storage.put_bytes(f"{key}/{_COMMIT}", json.dumps(values).encode())
        self.prune()
        return Checkpoint(key=key, attempt=self._attempt, **values)

    def candidates(self) -> Iterator[Checkpoint]:
        """Iterate over complete checkpoints, newest first: those of this run, then those of its origins."""
        for prefix in (self._prefix, *self._origins):
            for checkpoint in self._committed(prefix):
                if all(
                    has_bundle(self._storage, _part(checkpoint.key, node)) for node in range(checkpoint.nodes)
                ):
                    yield checkpoint

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint to resume from."""
        return next(self.candidates(), None)

    def restore(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Combine the files of all nodes in ``folder`` (replaced), each verified.

        On failure nothing is left there. Raises DamagedError naming the file, or UserError if the disk is too
        small. Ranks name their files by rank, so the parts do not overlap.
        """
        temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            for node in range(checkpoint.nodes):
                fetch_files(self._storage, _part(checkpoint.key, node), temporary)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def prune(self) -> None:
        """Delete committed checkpoints except the newest and the best, and older uncommitted ones.

        The best is named by the newest checkpoint's notes.
        """
        committed = list(self._committed(self._prefix))
        best = committed[0].extra.get("best_step") if committed else None
        best_checkpoints = [checkpoint for checkpoint in committed if checkpoint.step == best]
        kept_keys = {checkpoint.key for checkpoint in (*committed[: self._keep], *best_checkpoints[:1])}
        newest = max(((c.attempt, c.step) for c in committed), default=(self._attempt, -1))
        for key, keys in self._folders(self._prefix).items():
            attempt, step = _order(key)
            if key in kept_keys or (attempt, step) > newest:
                continue
            # The commit is deleted first, so that a partly deleted checkpoint does not count as complete
            self._storage.delete([f"{key}/{_COMMIT}"])
            self._storage.delete(keys)

    def _key(self, step: int) -> str:
        return f"{self._prefix}/step-{step:08d}.{self._attempt}"

    def _folders(self, prefix: str) -> dict[str, list[str]]:
        """Return the keys of each checkpoint folder, newest attempt and step first."""
        folders: dict[str, list[str]] = {}
        for key in self._storage.keys(prefix):
            name = key.removeprefix(f"{prefix}/").partition("/")[0]
            if _FOLDER.fullmatch(name):
                folders.setdefault(f"{prefix}/{name}", []).append(key)
        return dict(sorted(folders.items(), key=lambda item: _order(item[0]), reverse=True))

    def _committed(self, prefix: str) -> Iterator[Checkpoint]:
        for key, keys in self._folders(prefix).items():
            if f"{key}/{_COMMIT}" in keys:
                try:
                    values = json.loads(self._storage.get_bytes(f"{key}/{_COMMIT}"))
                    yield Checkpoint(key=key, attempt=_order(key)[0], **values)
                except (FileNotFoundError, ValueError, TypeError):
                    continue


def restore_newest(
    store: CheckpointStore, folder: Path, *, step: int | None = None
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Restore the newest intact checkpoint; the second value describes the damaged ones that were skipped.

    ``step``: only consider checkpoints of that step.
    """
    skipped: list[str] = []
    for checkpoint in store.candidates():
        if step is not None and checkpoint.step != step:
            continue
        try:
            store.restore(checkpoint, folder)
        except DamagedError as error:
            skipped.append(f"step {checkpoint.step}: {error.problem}")
        else:
            return checkpoint, tuple(skipped)
    return None, tuple(skipped)


def _part(key: str, node: int) -> str:
    return f"{key}/node-{node:05d}"


def _order(key: str) -> tuple[int, int]:
    """Return (attempt, step); a later attempt resumed from an earlier one's complete checkpoints."""
    match = _FOLDER.fullmatch(key.rpartition("/")[2])
    if match is None:
        raise ValueError(key)
    return int(match[2]), int(match[1])
