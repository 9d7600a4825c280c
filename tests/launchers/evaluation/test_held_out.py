"""Evaluation of held-out rows by the measure of each task."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from launchers.dataset.prepared import Prepared
from launchers.evaluation.held_out import calibrate, scorer_of
from launchers.models import causal
from launchers.settings import Settings
from tests.launchers.engines.loop import runs

ROWS = 7


def held_out(folder: Path, task: str) -> Prepared:
    rows = {"sft": runs.documents, "kto": runs.judged}.get(task, runs.pairs)(ROWS)[:ROWS]
    return Prepared(runs.make_data(folder, rows, batch=1, steps=ROWS))


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo", "kto", "reward"])
def test_a_model_compared_with_itself_scores_chance_and_a_changed_model_does_not(
    tmp_path: Path, task: str
) -> None:
    kind = "rewards" if task == "reward" else "llama"
    model = causal.load(runs.make_model(tmp_path / "model", kind), dtype=torch.float32).eval()
    scorer = scorer_of(Settings.model_validate({"task": task}), held_out(tmp_path / "data", task), ROWS)
    first = scorer.score(model)
    assert first.rows == ROWS
    if task in ("dpo", "kto"):  # which compare with the first model that is scored
        assert first.loss == pytest.approx(math.log(2) if task == "dpo" else 0.5)
        assert first.metrics["accuracy"] == 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    second = scorer.score(model)
    assert second.loss != pytest.approx(first.loss, rel=1e-3)
    assert second.labels == first.labels
    assert sum(each.pairs for each in scorer.calibration) == (ROWS if task == "reward" else 0)


def test_fewer_rows_are_scored_if_requested(tmp_path: Path) -> None:
    model = causal.load(runs.make_model(tmp_path / "model"), dtype=torch.float32).eval()
    data = held_out(tmp_path / "data", "sft")
    score = scorer_of(Settings(), data, 2).score(model)
    total, count = 0.0, 0
    for row in (data.row(0), data.row(1)):
        labels = torch.from_numpy(row.labels[1:].copy()).long()
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row.tokens.copy()).long()[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels >= 0).sum())
    assert (score.rows, score.labels) == (2, count)
    assert score.loss == pytest.approx(total / count, rel=1e-5)


def test_calibration_counts_how_often_a_confident_model_is_right() -> None:
    bins = calibrate([4.0, 4.2, -4.1, 0.0, 0.1])
    assert (bins[0].pairs, bins[0].right) == (2, 0.75)  # a tie and a right one
    assert bins[1].confidence > 0.95
    assert bins[1].right == 2 / 3
    assert calibrate([]) == ()
