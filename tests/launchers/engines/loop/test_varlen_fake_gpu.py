"""Forward passes and attention operators with fake tensors of a GPU: devices, shapes and types.

Kernels are replaced by torch's shape functions. The tests find tensors that are created on the CPU,
arguments that an operator does not have, and wrong shapes, types and strides. They do not find wrong values,
limits that only a kernel checks, errors of Triton, and errors in the backward passes of models.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launchers.engines import ranks
from tests.launchers.engines.loop.fake_gpu import CASES, FAULTY


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Errors by case, empty for those that passed."""
    command = [sys.executable, "-m", "tests.launchers.engines.loop.fake_gpu"]
    done = subprocess.run(command, cwd=ranks.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_is_on_another_device(case: str, errors: dict[str, str]) -> None:
    assert errors[case] == ""


@pytest.mark.parametrize("case", FAULTY)
def test_a_tensor_on_another_device_is_found(case: str, errors: dict[str, str]) -> None:
    assert "DeviceMismatchError" in errors[case]
