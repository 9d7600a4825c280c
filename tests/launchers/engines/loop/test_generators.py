"""Random generators resume from a checkpoint, and their file executes no code."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from estimator.errors import UserError  # noqa: E402
from launchers.engines.loop import generators  # noqa: E402
from launchers.gang.rank import RankEnv  # noqa: E402

RANK = RankEnv(rank=1, local_rank=1, world_size=2, local_world_size=2, node=0)


def drawn() -> list[Any]:
    """Draw random numbers, including the second of a pair of normal deviates, which is cached."""
    return [
        torch.randn(5).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
        np.random.standard_normal(3).tolist(),
        np.random.randint(0, 2**31, 700).tolist(),
    ]


@pytest.fixture(autouse=True)
def _restored_generators() -> Any:
    with generators.kept():
        yield


def test_all_three_random_generators_resume_bit_for_bit_from_a_file(tmp_path: Path) -> None:
    generators.seed(7)
    drawn()
    generators.save(tmp_path, RANK)
    expected_draws = drawn()
    generators.seed(8)
    generators.restore(tmp_path, RANK)
    assert drawn() == expected_draws


def test_random_numbers_drawn_inside_the_context_do_not_advance_the_generators() -> None:
    generators.seed(7)
    expected_draws = drawn()
    generators.seed(7)
    with generators.kept():
        drawn()
    assert drawn() == expected_draws


def test_generators_are_unchanged_for_a_rank_without_saved_states(tmp_path: Path) -> None:
    generators.seed(7)
    expected_draws = drawn()
    generators.seed(7)
    generators.restore(tmp_path, RANK)
    assert drawn() == expected_draws


class _Calls:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_file_with_code_and_a_file_of_an_older_version_are_refused(
    tmp_path: Path,
) -> None:
    generators.save(tmp_path, RANK)
    (file,) = tmp_path.iterdir()
    states = torch.load(file, weights_only=True)
    mark = tmp_path / "was-here"
    older = states | {"numpy": np.random.get_state()}
    for content in (states | {"python": _Calls(mark)}, older):
        torch.save(content, file)
        with pytest.raises(UserError, match="holds more than tensors") as caught:
            generators.restore(tmp_path, RANK)
        assert "start from the beginning" in caught.value.advice
    assert not mark.exists()
