"""A stored result as the reference for settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from checklist import reference, result
from checklist.options import Options
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.runs import SETTINGS, all_with, gpu_run, with_facts

OTHER = {**SETTINGS, "CPU governor": "powersave"}


def write_result(folder: Path, nodes: int = 4, odd: int = 0) -> Path:
    """Write a result in which one node has different settings."""
    file = folder / "result.json"
    result.write(judge(with_facts(gpu_run(nodes), 8 * odd, settings=OTHER)), file)
    return file


def test_a_reference_has_the_settings_of_most_nodes_or_of_the_named_node(tmp_path: Path) -> None:
    file = write_result(tmp_path)
    assert reference.read(file)["p5.48xlarge"]["CPU governor"] == "performance"
    assert reference.read(file, "host-0")["p5.48xlarge"]["CPU governor"] == "powersave"


def test_the_condensed_result_of_a_large_run_gives_the_same_reference(tmp_path: Path) -> None:
    file = write_result(tmp_path, nodes=130, odd=3)
    reported = [fact for fact in result.read(file).measurements.facts if len(fact.settings) > 1]
    assert [fact.node for fact in reported] == [0, 3]
    assert reference.read(file)["p5.48xlarge"] == {
        name: value for name, value in SETTINGS.items() if name != "cpu"
    }
    assert reference.read(file, "host-99")["p5.48xlarge"]["CPU governor"] == "performance"


def test_a_setting_that_differs_between_two_nodes_is_not_in_the_reference(tmp_path: Path) -> None:
    assert "CPU governor" not in reference.read(write_result(tmp_path, nodes=2))["p5.48xlarge"]


def test_an_unusable_reference_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no settings of host-9\.") as error:
        reference.read(write_result(tmp_path), "host-9")
    assert error.value.advice == "It has those of host-0, host-1, host-2, host-3."
    with pytest.raises(UserError, match="cannot be read: No such file"):
        reference.read(tmp_path / "missing.json")
    old = tmp_path / "old.json"
    result.write(judge(all_with(gpu_run(2), settings={})), old)
    with pytest.raises(UserError, match="has no settings of any node"):
        reference.read(old)


def test_an_unknown_reference_node_is_refused_with_the_nodes_of_the_run() -> None:
    with pytest.raises(UserError, match="no node 'h9' among those of this run, host-0, host-1") as error:
        reference.check_node("h9", gpu_run(2).facts)
    assert error.value.advice == "Give --reference-node one of them."
    reference.check_node("host-1", gpu_run(2).facts)
    reference.check_node(None, gpu_run(2).facts)


def test_a_reference_from_another_run_needs_no_node_of_this_run() -> None:
    options_of_reference = Options(reference_settings="result.json", reference_node="h1")
    assert options_of_reference.of_nodes() == Options()
    assert Options(reference_node="h1").of_nodes().reference_node == "h1"
