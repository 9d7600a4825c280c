"""What a plan says of its choices."""

from typing import Any

import pytest

from estimator import Job, Target, plan
from estimator.models import find


def lines_on_lengths(device: Any = "cuda", **changes: Any) -> list[str]:
    job = Job(model=find("tiny-llama"), seq_len=256, **changes)
    target = Target(kind="kubernetes", device=device, gpu="L4" if device == "cuda" else None)
    return [line for line in plan(job, target).why if line.startswith("batches vary in length")]


@pytest.mark.parametrize("engine", ["torchtune", "deepspeed"])
def test_only_what_is_switched_on_is_said_of_varying_lengths_in_one_line(engine: Any) -> None:
    for longest, segments in ((True, True), (True, False), (False, True)):
        switches = {"longest_first": longest, "expandable_segments": segments}
        (line,) = lines_on_lengths(engine=engine, **switches)
        assert ("the longest" in line, "expandable segments" in line) == (longest, segments)
    assert lines_on_lengths(longest_first=False, expandable_segments=False) == []


@pytest.mark.parametrize("values", [{"packing": True}, {"engine": "torchtitan"}, {"device": "cpu"}])
def test_nothing_is_said_where_batches_are_of_one_length_or_there_is_no_such_allocator(
    values: dict[str, Any],
) -> None:
    assert lines_on_lengths(**values) == []
