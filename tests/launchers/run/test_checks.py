"""Checks before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.run.checks import check_output
from launchers.settings import Settings


def test_a_folder_where_no_file_can_be_created_is_refused_as_output(tmp_path: Path) -> None:
    check_output(Settings(output_dir=str(tmp_path / "new" / "folder")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="/proc is not writable"):  # even root creates no file there
        check_output(Settings(output_dir="/proc/finetuned"))
