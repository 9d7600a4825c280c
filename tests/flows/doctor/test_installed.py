"""Versions of installed packages, and incomplete extras."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.flows.doctor.conftest import QueryProbe


def test_packages_are_shown_with_their_versions(query_probe: QueryProbe) -> None:
    lines = query_probe("packages")
    assert {line.state for line in lines.values()} == {"ok"}
    assert (lines["torch"].found, lines["metaflow"].found) == (version("torch"), version("metaflow"))


def test_an_extra_that_is_not_installed_is_optional(query_probe: QueryProbe) -> None:
    lines = query_probe("extras")
    assert "torchtune, deepspeed, fsdp2, train" in lines["extras"].found
    try:
        version("vllm")
    except PackageNotFoundError:
        assert "extra vllm" not in lines
        assert "vllm" in lines["extras"].found.partition("; optional: ")[2]
    else:
        pytest.skip("vLLM is installed here")


def test_an_unsupported_release_is_reported(query_probe: QueryProbe, tmp_path: Path) -> None:
    for name, number in (("tensorboard", "1.0"), ("metaflow", "2.10")):
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    assert query_probe("extras", PYTHONPATH=str(tmp_path))["extra trackers"].found == (
        "tensorboard 1.0; required: >=2.16"
    )
    versions = query_probe("packages", PYTHONPATH=str(tmp_path))["metaflow-finetune"]
    assert versions.state == "no"
    assert "metaflow 2.10; required:" in versions.found
