"""What lies beside a finished model repeats its run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from estimator.models import resolve
from launchers import handover, model_card
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
    (tmp_path / "model" / handover.PAGE).write_text("## Asking it\n")
    for _ in range(2):  # the page is not written into itself
        model_card.write_records(
            tmp_path, plan, settings, [("steps", "1")], model=resolve("tiny-llama"), again="python x.py"
        )
    kept = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert kept["dataset"] == kept["evaluation"]["dataset"] == str(tmp_path / "rows.jsonl")
    assert kept["mixture"] == {str(tmp_path / "other.jsonl"): 2.0}
    assert kept["model"] == "tiny-llama"
    assert Settings.model_validate(kept)
    page = (tmp_path / "model" / handover.PAGE).read_text()
    assert page.startswith("---\n")
    assert page.endswith("## Asking it\n")
    assert page.count("# test, fine-tuned") == 1
