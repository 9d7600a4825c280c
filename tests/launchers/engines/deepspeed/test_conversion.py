"""Conversion of DeepSpeed checkpoints executes no code in their files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[4]


class Calls:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.slow  # a process imports DeepSpeed
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
def test_a_pickle_that_would_call_a_function_is_refused_in_one_line(tmp_path: Path, zipped: bool) -> None:
    folder, mark = tmp_path / "engine", tmp_path / "was-here"
    folder.mkdir()
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        torch.save({"x": Calls(mark)}, folder / name, _use_new_zipfile_serialization=zipped)
    command = [sys.executable, "-m", "launchers.engines.deepspeed.conversion"]
    command += ["--input_folder", str(folder), "--output_folder", str(tmp_path / "universal")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "holds more than tensors and plain values" in last
    assert "would call posix.mkdir" in last
    assert "Traceback" not in done.stderr
    assert not mark.exists()
