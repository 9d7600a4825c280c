"""What lies beside a finished model repeats its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from estimator.models import resolve
from estimator.plan import GIB, Plan
from launchers.evaluation.evaluate import Answer, EvaluationResult
from launchers.report.metrics import Summary
from launchers.report.peak import MemoryPeak
from launchers.results import handover, model_card
from launchers.settings import Settings, build
from tests.launchers.engines.loop import runs


def test_the_settings_name_local_files_by_their_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("{}\n")
    settings = build(
        {
            "dataset": "rows.jsonl",
            "mixture": {"./other.jsonl": 2.0},
            "evaluation": {"dataset": "rows.jsonl"},
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
    kept = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert kept["dataset"] == kept["evaluation"]["dataset"] == str(tmp_path / "rows.jsonl")
    assert (kept["mixture"], kept["model"]) == ({str(tmp_path / "other.jsonl"): 2.0}, "tiny-llama")
    assert Settings.model_validate(kept)
    page = (tmp_path / "model" / handover.PAGE).read_text()
    assert page.startswith("---\n")
    assert page.endswith(handover.HEADING + "\n")
    assert page.count("# test, fine-tuned") == 1


SUMMARY = Summary(
    steps=1,
    first_loss=2.0,
    last_loss=1.0,
    step_seconds=0.5,
    tokens_per_second=100.0,
    tokens_per_second_per_gpu=100.0,
    samples_per_second=1.0,
    mfu=None,
)


def shown_plan(tmp_path: Path, outside_bytes: int | None) -> Plan:
    """A plan that is to show 1.04 GiB on a GPU."""
    plan = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1).plan
    memory = replace(
        plan.prediction.memory,
        shows_bytes=int(1.04 * GIB),
        shows_range=(GIB, int(1.14 * GIB)),
        outside_bytes=outside_bytes,
    )
    return replace(plan, prediction=replace(plan.prediction, memory=memory))


@pytest.mark.parametrize(
    ("peak", "outside", "row"),
    [
        (
            MemoryPeak(size_bytes=int(1.02 * GIB), counter="device"),
            int(0.75 * GIB),
            ("peak memory of a GPU, by NVML", "predicted 1.04 GiB (up to 1.14 GiB), measured 1.02 GiB"),
        ),
        (
            MemoryPeak(size_bytes=int(0.31 * GIB), counter="reserved"),
            int(0.75 * GIB),
            ("peak memory reserved by torch", "predicted 0.29 GiB (up to 0.39 GiB), measured 0.31 GiB"),
        ),
        (
            MemoryPeak(size_bytes=int(0.31 * GIB), counter="reserved"),
            None,
            ("peak memory reserved by torch", "predicted unknown, measured 0.31 GiB"),
        ),
        (
            MemoryPeak(size_bytes=GIB, counter="resident"),
            None,
            ("peak memory of a process", "predicted 1.04 GiB (up to 1.14 GiB), measured 1.00 GiB"),
        ),
        (None, None, ("peak memory of a process", "predicted 1.04 GiB (up to 1.14 GiB), measured unknown")),
    ],
)
def test_the_last_lines_compare_memory_with_what_was_predicted_for_its_counter(
    tmp_path: Path, peak: MemoryPeak | None, outside: int | None, row: tuple[str, str]
) -> None:
    facts = model_card.closing_facts(shown_plan(tmp_path, outside), SUMMARY, peak, None)
    assert row in facts
    assert sum("peak memory" in name for name, _ in facts) == 1


def test_the_facts_count_right_answers_before_and_after(tmp_path: Path) -> None:
    answers = tuple(Answer(prompt="p", reference="yes", base="no", finetuned=text) for text in ("yes", "no"))
    evaluation = EvaluationResult(base=None, finetuned=None, answers=answers)
    plan = shown_plan(tmp_path, None)
    facts = dict(model_card.closing_facts(plan, SUMMARY, None, evaluation))
    assert facts["held-out answers right"] == "0 of 2 before, 1 of 2 after"
    assert "held-out answers right" not in dict(model_card.closing_facts(plan, SUMMARY, None, None))
