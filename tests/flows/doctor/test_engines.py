"""Installed engines work; missing or broken ones are reported with a fix."""

from __future__ import annotations

from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from estimator.vocabulary import LAUNCHED_ENGINES
from launchers import engines
from tests.flows.doctor.conftest import QueryProbe


def test_each_engine_has_its_modules_and_its_extra() -> None:
    for name in LAUNCHED_ENGINES:
        assert all(find_spec(module) for module in engines.needs(name).modules)
        assert engines.needs(name).extra in metadata("metaflow-finetune").get_all("Provides-Extra", [])


@pytest.mark.slow
@pytest.mark.nightly  # test_command.py probes the engines with every change
def test_installed_engines_work(query_probe: QueryProbe) -> None:
    lines = query_probe("engines")
    assert list(lines) == list(reversed(LAUNCHED_ENGINES))
    assert {line.state for line in lines.values()} == {"ok"}
    assert lines["fsdp2"].found.startswith("works: torch 2.")


@pytest.mark.parametrize(
    ("engine", "package", "extra"), [("torchtune", "torchtune", "train"), ("trl", "trl", "rl")]
)
def test_a_missing_package_names_the_extra_to_install(
    engine: str, package: str, extra: str, query_probe: QueryProbe, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    line = query_probe("engines", only=(engine,), PYTHONPATH=str(tmp_path))[engine]
    assert line.state == "no"
    assert line.found.startswith(f"{package} is not installed")
    assert line.fix == f"pip install 'metaflow-finetune[{extra}]'"


def test_a_package_whose_import_fails_is_reported_as_broken(query_probe: QueryProbe, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise OSError('undefined symbol: x')")
    line = query_probe("engines", only=("deepspeed",), PYTHONPATH=str(tmp_path))["deepspeed"]
    assert (line.state, line.found) == ("no", "import failed: undefined symbol: x")
    assert "metaflow-finetune[deepspeed]" in line.fix
