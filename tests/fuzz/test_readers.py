"""Damaged files and responses end in the errors of the package, in bounded time and memory."""

from __future__ import annotations

import contextlib
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.inputs import damaged
from tests.fuzz.limits import held_to
from tests.fuzz.readers import READERS, Reader

FAST, NIGHTLY = 25, 4000  # inputs for each reader
FAST_S, NIGHTLY_S = 30 / len(READERS), 3600 / len(READERS)  # after which no further input is read


def write_input(folder: Path, reader: Reader, data: bytes) -> Path:
    """Write the input and what belongs next to it into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in {**reader.others, reader.file: data}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / reader.file


def fuzz(reader: Reader, folder: Path, examples: int, limit_s: float, *, repeatable: bool) -> int:
    """Read damaged inputs until one fails or the time is over; return how many were read."""
    with contextlib.suppress(*reader.refusals):  # imports what the reader needs
        reader.read(write_input(folder, reader, reader.seed))
    done, problem, end = 0, "", time.monotonic() + limit_s

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=repeatable,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(reader.seed))
    def check(data: bytes) -> None:
        nonlocal done, problem
        if problem or time.monotonic() > end:  # Hypothesis itself would print an input of 100 kB
            return
        path = write_input(folder, reader, data)
        try:
            with held_to(len(data)), contextlib.suppress(*reader.refusals):
                reader.read(path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
            failing_input = folder.with_name("failing") / reader.file
            failing_input.parent.mkdir(parents=True, exist_ok=True)
            failing_input.write_bytes(data)
            traceback.print_exc(limit=-4)
            problem = f"{type(error).__name__}: {str(error)[:300]} for {failing_input}, {data[:100]!r}"
        done += 1

    check()
    assert not problem, problem
    return done


@pytest.mark.parametrize(
    ("examples", "limit_s"),
    [(FAST, FAST_S), pytest.param(NIGHTLY, NIGHTLY_S, marks=[pytest.mark.slow, pytest.mark.nightly])],
)
@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused_in_one_clear_error(
    name: str,
    examples: int,
    limit_s: float,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    repeatable = examples == FAST
    count = fuzz(READERS[name], tmp_path / "input", examples, limit_s, repeatable=repeatable)
    record_property("inputs", count)
