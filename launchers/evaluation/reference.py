"""Log-probabilities of the reference model (the untrained base), precomputed for DPO and KTO.

With LoRA, the reference model is the model with its adapters disabled. If all weights are trained, or the
adapters cannot be disabled, its log-probabilities are computed before training, in parts divided among the
nodes (launchers.precompute.parts). Stored parts of the same model, data and precision are reused.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from estimator.vocabulary import METHODS, TASKS
from launchers.base.imports import collector_paused
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.processes import PARENT, die_with_parent
from launchers.dataset.measured import MAX_BATCH_TOKENS, batches_by_length
from launchers.dataset.prepared import Prepared, Row
from launchers.evaluation.loading import load_model, precision_on
from launchers.gang.job import TrainJob
from launchers.models import hf_layout
from launchers.precompute import parts
from launchers.store.bundles import Storage

PART = 256  # items per part
# float32. Pairs: [rows, 2], chosen and rejected answer. Judged answers: [rows + length of the order, 1]: all
# rows, then the mismatched rows in training order (batches.mismatched_rows)
FILE = "reference.npy"


def is_needed(job: TrainJob) -> bool:
    """Whether a job needs a reference model that is not available during training."""
    return TASKS[job.settings.task].compares and not METHODS[job.plan.method].low_rank


def precompute(
    job: TrainJob, address: NodeAddress, store: Storage, work: Path, *, max_rows: int | None = None
) -> Path:
    """Compute the reference log-probabilities, together with other nodes; return the file, below ``work``.

    ``max_rows``: compute only the first rows, without mismatched ones, as for evaluation; None: everything.

    Raises UserError if the computation fails, or if no part of any node arrives within
    ``resources.hang_timeout_s``; four times as long for the first part, which includes loading the model.
    """
    import numpy as np

    data = Prepared(job.data_dir)
    count = min(len(data), max_rows or sys.maxsize)
    if max_rows is None:
        count = len(_Items(data, judged=TASKS[job.settings.task].judged))
    division = _division(job, count)
    work = work / division.fingerprint  # ``work`` may contain parts of an earlier run with other rows
    request = {
        "model_dir": str(job.model_dir),
        "data_dir": str(job.data_dir),
        "judged": TASKS[job.settings.task].judged,
        "device": job.plan.layout.device,
        "trust_remote_code": job.settings.trust_remote_code,
    }
    on_cpu, limit_s = job.plan.layout.device == "cpu", job.settings.resources.hang_timeout_s
    files = parts.compute_all(division, request, address, store, work, on_cpu=on_cpu, limit_s=limit_s)
    np.save(work / FILE, np.concatenate([np.load(file) for file in files]))
    return work / FILE


def _division(job: TrainJob, count: int) -> parts.Parts:
    """Divide the computation into parts, with a fingerprint of weights, rows and precision."""
    texts = (
        Prepared(job.data_dir).info.fingerprint,
        precision_on(job.plan.layout.device),
        (job.model_dir / "config.json").read_text(),
    )
    return parts.Parts(
        name="reference",
        module="launchers.evaluation.reference",
        fingerprint=parts.fingerprint(texts, hf_layout.weight_files(job.model_dir)),
        count=count,
        size=PART,
        suffix=".npy",
    )


def main() -> None:
    """Entry point of the process that computes parts."""
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    request = json.loads(Path(sys.argv[1]).read_text())
    folder, device = Path(request["model_dir"]), request["device"]
    trust_remote_code = request["trust_remote_code"]
    model = load_model(folder, folder, device, precision_on(device), trust_remote_code=trust_remote_code)
    all_items = _Items(Prepared(Path(request["data_dir"])), judged=request["judged"])
    for part in request["parts"]:
        items = range(part * PART, min((part + 1) * PART, request["count"]))
        _write_part(model, all_items, items, Path(request["out"]) / f"part-{part:05d}.npy")


class _Items:
    """Rows to compute log-probabilities of, by number: all rows; for KTO also the mismatched rows."""

    def __init__(self, data: Prepared, *, judged: bool) -> None:
        self.data, self.judged = data, judged
        # Cached: batches_by_length reads in order of length, so each step is read several times
        self._mismatched_rows = functools.lru_cache(maxsize=PART)(self._mismatched_step)

    def __len__(self) -> int:
        return len(self.data) + (len(self.data.order) if self.judged else 0)

    def row(self, number: int) -> Row:
        """Return the row of this number."""
        if number < len(self.data):
            return self.data.row(number)
        step, position = divmod(number - len(self.data), self.data.info.global_batch_size)
        return self._mismatched_rows(step)[position]

    def _mismatched_step(self, step: int) -> list[Row]:
        from launchers.dataset.batches import mismatched_rows

        return mismatched_rows(self.data, step)


def _write_part(model: Any, all_items: _Items, items: range, path: Path) -> None:
    """Compute a part, and write its file atomically (contents: :data:`FILE`)."""
    with collector_paused():
        import numpy as np
        import torch

        from launchers.dataset.batches import collate, collate_pairs, summed_log_probabilities

    pad_id = all_items.data.info.pad_id
    collate_rows = collate if all_items.judged else collate_pairs
    values = np.empty((len(items), 1 if all_items.judged else 2), dtype=np.float32)
    with torch.inference_mode():
        for numbers in batches_by_length(all_items, items, MAX_BATCH_TOKENS[model.device.type]):
            batch = collate_rows([all_items.row(number) for number in numbers], pad_id).to(model.device)
            sums = summed_log_probabilities(model(**batch.inputs, use_cache=False).logits, batch)
            # a batch of pairs has all chosen answers first, then all rejected ones
            item_sums = sums.reshape(-1, len(numbers)).T
            values[[number - items.start for number in numbers]] = item_sums.float().cpu().numpy()
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, values)
    temporary.rename(path)


if __name__ == "__main__":
    main()
