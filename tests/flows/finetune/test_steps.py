"""What the steps of a fine-tuning run have in common."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from estimator.errors import Change, UserError
from flows.finetune import steps


def test_a_users_mistake_in_a_task_names_options_as_the_flow_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path))
    monkeypatch.setattr(steps, "current", SimpleNamespace(run_id="7", task_id="2"))
    advice = ("Give ", Change("global_batch_size", 5), " or ", Change("train_on_prompt", True), ".")
    with pytest.raises(UserError) as refused, steps.task_folder("prepare") as work:
        raise UserError("Too little.", advice)
    assert refused.value.advice == "Give --global-batch-size 5 or --train-on-prompt."
    assert not work.exists()
