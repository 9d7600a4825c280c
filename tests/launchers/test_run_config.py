"""Settings of a run with every default resolved."""

from __future__ import annotations

import pickle

from estimator.models import find
from launchers import run_config, settings


def test_kernels_that_the_user_left_to_the_plan_stay_known_in_other_processes() -> None:
    chosen = settings.build({"liger": True, "compile": "auto", "packing": False})
    config = run_config.resolve(chosen, find("tiny-llama"), method="lora", engine="fsdp2")
    assert "compile" in config.automatic_choices
    assert not {"liger", "packing"} & set(config.automatic_choices)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    assert run_config.RunConfig.model_validate(config.model_dump(mode="json")) == config
