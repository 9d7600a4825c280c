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
def test_what_is_done_about_varying_lengths_is_said_in_one_line(engine: Any) -> None:
    (line,) = lines_on_lengths(engine=engine)
    assert line == (
        "batches vary in length: the longest comes first, freed memory is used again (expandable segments)"
    )


def test_only_what_is_switched_on_is_said() -> None:
    assert lines_on_lengths(expandable_segments=False) == ["batches vary in length: the longest comes first"]
    (line,) = lines_on_lengths(longest_first=False)
    assert "the longest" not in line
    assert "expandable segments" in line
    assert lines_on_lengths(longest_first=False, expandable_segments=False) == []


@pytest.mark.parametrize("values", [{"packing": True}, {"engine": "torchtitan"}, {"device": "cpu"}])
def test_nothing_is_said_where_batches_are_of_one_length_or_there_is_no_such_allocator(
    values: dict[str, Any],
) -> None:
    assert lines_on_lengths(**values) == []
