"""Reasons of a plan for its choices."""

from typing import Any

import pytest

from estimator import Job, Target, plan
from estimator.models import find

SWITCHES = {"longest_first": True, "expandable_segments": True}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (SWITCHES, (True, True)),
        (SWITCHES | {"engine": "deepspeed", "longest_first": False}, (False, True)),
        (SWITCHES | {"expandable_segments": False}, (True, False)),
        ({"longest_first": False, "expandable_segments": False}, None),
        (SWITCHES | {"packing": True}, None),
        (SWITCHES | {"engine": "torchtitan"}, None),
        (SWITCHES | {"device": "cpu"}, None),
    ],
)
def test_the_reason_for_varying_lengths_names_the_enabled_options(
    fields: dict[str, Any], named: tuple[bool, bool] | None
) -> None:
    switches = {name: value for name, value in fields.items() if name != "device"}
    device = fields.get("device", "cuda")
    job = Job(model=find("tiny-llama"), seq_len=256, **switches)
    target = Target(kind="kubernetes", device=device, gpu="L4" if device == "cuda" else None)
    lines = [line for line in plan(job, target).why if line.startswith("batches vary in length")]
    assert [("the longest" in line, "expandable segments" in line) for line in lines] == (
        [named] if named else []
    )
