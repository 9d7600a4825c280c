"""Files next to a finished model describe its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from estimator.models import resolve
from estimator.plan import GIB, Counter, Plan
from launchers.evaluation.result import Answer, EvaluationResult
from launchers.report.metrics import Summary
from launchers.report.peak import MemoryPeak
from launchers.results import handover, model_card
from launchers.settings import Settings, build
from tests.launchers.engines.loop import runs


def test_the_settings_on_the_card_show_absolute_paths_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "größe.jsonl").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("{}\n")
    settings = build(
        {
            "dataset": "größe.jsonl",
            "mixture": {"./other.jsonl": 2.0},
            "evaluation": {"dataset": "größe.jsonl"},
            "model": "tiny-llama",
        }
    )
    plan = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1).plan
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / handover.PAGE).write_text(handover.HEADING + "\n")
    for _ in range(2):  # the page is not written into itself
        model_card.write_records(
            tmp_path, plan, settings, [("steps", "1")], model=resolve("tiny-llama"), command="python x.py"
        )
    text = (tmp_path / "settings.yaml").read_text(encoding="utf-8")
    assert "größe.jsonl" in text
    card_settings = yaml.safe_load(text)
    assert card_settings["dataset"] == card_settings["evaluation"]["dataset"] == str(tmp_path / "größe.jsonl")
    assert (card_settings["mixture"], card_settings["model"]) == (
        {str(tmp_path / "other.jsonl"): 2.0},
        "tiny-llama",
    )
    assert Settings.model_validate(card_settings)
    page = (tmp_path / "model" / handover.PAGE).read_text()
    assert page.startswith("---\n")
    assert page.endswith(handover.HEADING + "\n")
    assert page.count("# test, fine-tuned") == 1


SPEEDS = {"tokens_per_second": 100.0, "tokens_per_second_per_gpu": 100.0, "samples_per_second": 1.0}
SUMMARY = Summary(steps=1, first_loss=2.0, last_loss=1.0, step_seconds=0.5, mfu=None, **SPEEDS)


def shown_plan(tmp_path: Path, outside_bytes: int | None) -> Plan:
    """Return a plan that predicts 1.04 GiB on a GPU."""
    plan = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1).plan
    memory = replace(
        plan.prediction.memory,
        shows_bytes=int(1.04 * GIB),
        shows_range=(GIB, int(1.14 * GIB)),
        outside_bytes=outside_bytes,
    )
    return replace(plan, prediction=replace(plan.prediction, memory=memory))


def peak(gib: float, counter: Counter) -> MemoryPeak:
    return MemoryPeak(size_bytes=int(gib * GIB), counter=counter)


@pytest.mark.parametrize(
    ("measured", "outside_gib", "name", "text"),
    [
        (peak(1.02, "device"), 0.75, "of a GPU, by NVML", "1.04 GiB (up to 1.14 GiB), measured 1.02 GiB"),
        (peak(0.31, "reserved"), 0.75, "reserved by torch", "0.29 GiB (up to 0.39 GiB), measured 0.31 GiB"),
        (peak(0.31, "reserved"), None, "reserved by torch", "unknown, measured 0.31 GiB"),
        (peak(1, "resident"), None, "of a process", "1.04 GiB (up to 1.14 GiB), measured 1.00 GiB"),
        (None, None, "of a process", "1.04 GiB (up to 1.14 GiB), measured unknown"),
    ],
)
def test_the_last_lines_compare_memory_with_the_prediction_of_the_same_counter(
    tmp_path: Path, measured: MemoryPeak | None, outside_gib: float | None, name: str, text: str
) -> None:
    outside = None if outside_gib is None else int(outside_gib * GIB)
    facts = model_card.closing_facts(shown_plan(tmp_path, outside), SUMMARY, measured, None)
    assert [row for row in facts if "peak memory" in row[0]] == [(f"peak memory {name}", f"predicted {text}")]


def test_the_card_counts_right_answers_before_and_after_training(tmp_path: Path) -> None:
    answers = tuple(Answer(prompt="p", reference="yes", base="no", finetuned=text) for text in ("yes", "no"))
    evaluation = EvaluationResult(base=None, finetuned=None, answers=answers)
    plan = shown_plan(tmp_path, None)
    facts = dict(model_card.closing_facts(plan, SUMMARY, None, evaluation))
    assert facts["held-out answers right"] == "0 of 2 before, 1 of 2 after"
    assert "held-out answers right" not in dict(model_card.closing_facts(plan, SUMMARY, None, None))
