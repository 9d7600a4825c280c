"""Settings from a flow's flags, settings file and ``--set``."""

from __future__ import annotations

import pytest

from estimator.errors import UserError
from flows.finetune import flags
from launchers import settings


def test_flags_override_the_file_and_set_overrides_both() -> None:
    chosen = flags.settings_from(
        {"seed": 1, "epochs": 2, "global_batch_size": 4},
        {"epochs": 3, "global_batch_size": 6, "set": ("global_batch_size=8",)},
    )
    assert (chosen.seed, chosen.epochs, chosen.global_batch_size) == (1, 3, 8)


def test_an_empty_flag_does_not_override_the_file() -> None:
    chosen = flags.settings_from({"optimizer": {"lr": 1e-4}}, {"lr": "", "nodes": None})
    assert chosen.optimizer.lr == 1e-4


def test_trackers_may_be_given_with_commas() -> None:
    assert flags.settings_from({}, {"tracker": "tensorboard, wandb"}).tracker == ("tensorboard", "wandb")


def test_every_flag_is_a_setting() -> None:
    names = settings.dotted_names()
    assert [name for name in flags.FLAGS.values() if name not in names] == []


def test_the_flags_of_the_rejection_flow_are_settings() -> None:
    chosen_settings = flags.settings_from({}, {"score": "a.py:f", "answers": 8})
    assert (chosen_settings.rejection.score, chosen_settings.rejection.answers) == ("a.py:f", 8)


def test_a_single_answer_per_prompt_is_refused() -> None:
    with pytest.raises(UserError, match=r"rejection\.answers = 1: should be greater than or equal to 2"):
        flags.settings_from({}, {"score": "a.py:f", "answers": 1})
