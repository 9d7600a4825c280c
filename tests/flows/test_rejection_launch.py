"""What is refused before a rejection run begins, and what is said of its size and price."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from flows import finetune_launch, rejection_launch
from launchers import settings


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text("def length(prompt, answer):\n    return len(answer)\n")
    return path


def test_the_flags_of_the_flow_are_settings() -> None:
    found = finetune_launch.settings_from({}, {"score": "a.py:f", "answers": 8})
    assert (found.rejection.score, found.rejection.answers) == ("a.py:f", 8)


def test_one_answer_is_nothing_to_choose_from() -> None:
    with pytest.raises(
        UserError, match=r"rejection\.answers = 1: should be 2 or more: one answer leaves nothing"
    ):
        finetune_launch.settings_from({}, {"score": "a.py:f", "answers": 1})


def test_a_run_without_a_scorer_is_refused() -> None:
    with pytest.raises(UserError, match="Nothing says how answers are scored"):
        rejection_launch.check(settings.build({}))


def test_a_task_on_pairs_is_refused(functions: Path) -> None:
    with pytest.raises(UserError, match="task sft"):
        rejection_launch.check(settings.build({"task": "dpo", "rejection": {"score": f"{functions}:length"}}))


def test_too_few_prompts_for_a_batch_are_refused(functions: Path, dataset: Path) -> None:
    values = {"dataset": str(dataset), "rejection": {"score": f"{functions}:length", "prompts": 10}}
    with pytest.raises(
        UserError, match="more than the 9 answers that can be kept to train on, of 10 prompts"
    ):
        rejection_launch.check(settings.build(values))


def test_steps_are_those_of_the_answers_that_can_be_kept(functions: Path, dataset: Path) -> None:
    values = {"dataset": str(dataset), "epochs": 2, "global_batch_size": 4}
    values["rejection"] = {"score": f"{functions}:length", "prompts": 40, "top_share": 0.5}
    found = rejection_launch.check(settings.build(values))
    assert found.prompts == 40
    assert found.trained.max_steps == (20 - 1) * 2 // 4


def test_the_size_is_said_and_what_is_not_known_is_called_unknown(
    functions: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {
        "settings": {},
        "score": f"{functions}:length",
        "answers": 4,
        "dataset": str(dataset),
        "plan_only": True,
        "overrides": ("rejection.max_new_tokens=10",),
    }
    with pytest.raises(SystemExit):
        finetune_launch.plan_from_parameters(params, "local")
    text = capsys.readouterr().out
    assert "60 prompts x 4 answers of at most 10 tokens: at most 2,400 tokens are generated" in text
    assert "unknown: the speed of generation is not predicted" in text


def test_the_size_of_a_dataset_that_is_elsewhere_is_unknown(functions: Path) -> None:
    values = {"dataset": "org/name", "rejection": {"score": f"{functions}:length"}}
    found = rejection_launch.check(settings.build(values))
    assert found.prompts is None
    assert found.trained.max_steps is None
