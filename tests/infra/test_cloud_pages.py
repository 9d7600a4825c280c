"""The cloud pages: their prices match the catalog, and their names exist in infra/."""

from __future__ import annotations

import re
from pathlib import Path

import metaflow.metaflow_config
import pytest
import yaml

from estimator import hardware
from estimator.hardware.cluster.pools import pool_of
from flows.cluster_check import launch
from tests.infra.manifests import KUBERNETES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("aws", "kubernetes", "gcp", "azure")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_and_variable_named_on_a_page_exists(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"(?<![\w-])infra/[\w./-]+\w", text):
        is_file_of_user = path.endswith(("/GPU", "/terraform.tfvars"))  # by the reader
        assert is_file_of_user or (ROOT / path).exists(), path
    for name in re.findall(r"`(components/[\w-]+|clusters/[\w.]+)`", text):
        assert (KUBERNETES / name).exists(), name
    known_variables = {f"METAFLOW_{name}" for name in dir(metaflow.metaflow_config)}
    assert set(re.findall(r"METAFLOW_\w+(?==)", text)) <= known_variables


def test_the_nightly_example_is_a_valid_options_file() -> None:
    """The options file names the queue and the machines of the cluster in the same folder."""
    text = (KUBERNETES / "examples" / "nightly.yaml").read_text()
    values = launch.read_options(text)
    pools = yaml.safe_load_all((KUBERNETES / "karpenter" / "node-pools.yaml").read_text())
    (h100,) = [pool for pool in map(pool_of, pools) if pool.name == "h100"]
    machine = hardware.current().find_instance("p5.48xlarge")
    assert machine is not None
    assert values["nodes"] <= (h100.machines_left(machine) or 0)
    folder = KUBERNETES / "queues" / values["queue"].removeprefix("finetune-")
    assert folder.is_dir()
