"""Checkpoint files are read as tensors and plain values; their code is not executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import state_dict_saver  # noqa: E402

from estimator.errors import UserError  # noqa: E402
from launchers.engines.tensors_only import load_distributed, tensors_only  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled"
)  # one process, without a group


class Calls:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)  # a function with no trace


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "was-here"


def refused(folder: Path, state: dict[str, Any], mark: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_distributed(state, folder)
    assert f"The checkpoint in {folder} holds more than tensors" in caught.value.problem
    assert "a file would call posix.mkdir" in caught.value.problem
    assert "\n" not in caught.value.problem
    assert not mark.exists()


def test_a_dcp_checkpoint_is_read_back_bit_by_bit(tmp_path: Path) -> None:
    values = {"weight": torch.randn(3, 5), "half": torch.randn(4).bfloat16(), "betas": (0.9, 0.99), "n": None}
    state_dict_saver.save(values, checkpoint_id=str(tmp_path))
    loaded_tensors = {"weight": torch.zeros(3, 5), "half": torch.zeros(4).bfloat16(), "betas": (0.0,), "n": 1}
    load_distributed(loaded_tensors, tmp_path)
    assert torch.equal(loaded_tensors["weight"], values["weight"])
    assert torch.equal(loaded_tensors["half"], values["half"])
    assert (loaded_tensors["betas"], loaded_tensors["n"]) == ((0.9, 0.99), None)


def test_a_pickled_value_that_would_call_a_function_is_refused(tmp_path: Path, mark: Path) -> None:
    state_dict_saver.save({"lr": Calls(mark)}, checkpoint_id=str(tmp_path / "c"))
    refused(tmp_path / "c", {"lr": 0.1}, mark)


def test_checkpoint_metadata_that_would_call_a_function_is_refused(tmp_path: Path, mark: Path) -> None:
    state_dict_saver.save({"lr": 0.1}, checkpoint_id=str(tmp_path / "c"))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Calls(mark)))
    refused(tmp_path / "c", {"lr": 0.1}, mark)


def test_a_load_without_weights_only_is_restricted_to_tensors_inside_the_context(
    tmp_path: Path, mark: Path
) -> None:
    """DeepSpeed loads like this. Outside of the context torch.load is unchanged."""
    torch.save({"state": Calls(mark)}, tmp_path / "states.pt")
    with (
        pytest.raises(UserError, match=r"a file would call posix\.mkdir"),
        tensors_only(tmp_path),
    ):
        torch.load(tmp_path / "states.pt", weights_only=False)
    assert not mark.exists()
    torch.load(tmp_path / "states.pt", weights_only=False)
    assert mark.exists()


def test_a_broken_file_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "states.pt").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="or is damaged") as caught, tensors_only(tmp_path):
        torch.load(tmp_path / "states.pt")
    assert "\n" not in caught.value.problem
