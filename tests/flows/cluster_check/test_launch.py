"""Requests of a checklist run, and refusals before it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from checklist import result
from checklist.options import json_schema
from checklist.verdict import judge
from estimator.errors import UserError
from flows.cluster_check import launch as checklist_launch
from flows.cluster_check.launch import DEFAULTS, Launch, build_request, resolve
from tests.checklist.runs import gpu_run
from tests.flows.checklist_options import FLOOR, options_with, values_with


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"only": "meshh"}, ["meshh", "Did you mean mesh?"]),
        ({"timeout": 0.0}, ["of 0 s"]),
        ({"thresholds": "missing.csv"}, ["missing.csv", "No such file"]),
        ({"json": "no/such/folder/result.json"}, ["no/such/folder", "--json"]),
        ({"apply": True}, ["--apply", "--taint"]),
        ({"taint": True, "label": True}, ["--taint", "--label"]),
        ({"webhook": True}, ["CHECKLIST_WEBHOOK_URL"]),
        ({"prometheus": "metrics.txt"}, ["metrics.txt", ".prom"]),
    ],
)
def test_impossible_options_are_refused_before_a_run(
    values: dict[str, Any], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHECKLIST_WEBHOOK_URL", raising=False)
    with pytest.raises(UserError) as refused:
        build_request(values_with(**{"device": "cpu", **values}), "local", None)
    for word in arguments:
        assert word in str(refused.value)


def test_more_gpus_than_this_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from checklist.checks.gpu.gpus_probe import VisibleGpus
    from checklist.run import local

    visible_gpus = VisibleGpus(uuids=("GPU-a", "GPU-b"), names=("H100", "H100"))
    monkeypatch.setattr(local.gpus_probe, "list_gpus", lambda: visible_gpus)
    with pytest.raises(UserError, match="--gpus-per-node 2 is more than the 1"):
        build_request(values_with(gpus_per_node=2), "local", None)


def test_the_gpus_of_one_machine_are_divided_among_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from checklist.checks.gpu.gpus_probe import VisibleGpus
    from checklist.run import local

    visible_gpus = VisibleGpus(uuids=("GPU-a", "GPU-b", "GPU-c", "GPU-d"), names=("H100",) * 4)
    monkeypatch.setattr(local.gpus_probe, "list_gpus", lambda: visible_gpus)
    launch = Launch(backend="local", gpus_per_node=None, thresholds=None, thresholds_file="")
    run_config = resolve(options_with(), launch, datastore="/")
    assert run_config.shares == (("GPU-a", "GPU-b"), ("GPU-c", "GPU-d"))
    assert (run_config.options.gpus_per_node, run_config.options.device) == (2, "cuda")
    # One GPU cannot be two nodes
    monkeypatch.setattr(local.gpus_probe, "list_gpus", lambda: VisibleGpus(uuids=("GPU-a",), names=("H100",)))
    run_config = resolve(options_with(), launch, datastore="/")
    assert (run_config.shares, run_config.options.device) == (((), ()), "cpu")


@pytest.mark.parametrize(
    ("values", "gpus", "arguments"),
    [
        ({"device": "cuda"}, None, ["--gpus-per-node 8"]),
        ({"gpus_per_node": 4}, 8, ["--gpus-per-node 4", "gpu=8"]),
        ({"instance_type": "p5.49xlarge"}, None, ["p5.49xlarge", "p5.48xlarge"]),
    ],
)
def test_options_that_a_cluster_cannot_satisfy_are_refused_before_a_run(
    values: dict[str, Any], gpus: int | None, arguments: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        build_request(values_with(**values), "batch", gpus)
    for word in arguments:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("nodess: 3", ["'nodess'", "Did you mean nodes?"]),
        ("nodes: two", ["nodes is 'two'", "a whole number"]),
        ("apply: perhaps", ["apply is 'perhaps'", "true or false"]),
        ("- nodes", ["not a mapping"]),
        ("nodes: [", ["not YAML"]),
    ],
)
def test_each_invalid_value_in_the_options_file_is_named(text: str, arguments: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        checklist_launch.read_options(text)
    for word in arguments:
        assert word in str(refused.value)


def test_values_of_the_options_file_override_the_defaults() -> None:
    read = checklist_launch.read_options("nodes: 4\nonly: [mesh, pairs]\ntimeout:\n")
    assert (read["nodes"], read["only"], read["timeout"], read["profile"]) == (4, "mesh,pairs", None, "quick")
    assert checklist_launch.read_options("") == DEFAULTS


def test_the_schema_of_the_options_file_is_up_to_date_and_accepts_valid_options() -> None:
    schema = json.loads(checklist_launch.SCHEMA_FILE.read_text())
    assert schema == json_schema(checklist_launch.FlowOptions), (
        "python -m flows.cluster_check.launch renews it"
    )
    for text in ("nodes: 4\nonly: [mesh, pairs]\ntimeout: 30\n", "only: mesh,pairs\ntaint: true\n"):
        jsonschema.validate(yaml.safe_load(text), schema)
        checklist_launch.read_options(text)
    for text in ("nodess: 3", "nodes: two", "profile: quik", "apply: perhaps"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(text), schema)


def test_the_number_of_gpus_and_the_network_follow_from_the_machine_type() -> None:
    step_request = build_request(values_with(instance_type="p5.48xlarge", nodes=4), "batch", None)
    assert step_request.request.gpus_per_node == 8
    assert step_request.request.shared_memory_mib >= 8 * 1024
    assert Launch.unpack(step_request.launch).gpus_per_node == 8


def test_a_run_that_requests_gpus_never_falls_back_to_cpus() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    run_config = resolve(options_with(), launch, datastore="s3://bucket/root")
    assert (run_config.options.device, run_config.options.gpus_per_node) == ("cuda", 8)
    assert run_config.options.datastore == "s3://bucket/root"
    assert run_config.options.start_limit_s > 600  # machines and images have to come first


def test_a_thresholds_file_is_sent_along_with_a_remote_run(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(FLOOR)
    launch = Launch.unpack(build_request(values_with(thresholds=str(file)), "batch", None).launch)
    file.unlink()
    run_config = resolve(options_with(thresholds=str(file)), launch, datastore="s3://bucket/root")
    user_rows = [row for row in checklist_launch.table_of(run_config.thresholds).rows if row.own]
    assert [(row.system, row.floor) for row in user_rows] == [("here", 1_000_000)]
    with pytest.raises(UserError, match="This deployment was made with"):
        resolve(options_with(thresholds="other.csv"), launch, datastore="s3://bucket/root")


def test_reference_settings_are_sent_along_with_a_remote_run(tmp_path: Path) -> None:
    file = tmp_path / "right.json"
    result.write(judge(gpu_run(4)), file)
    values = {"reference_settings": str(file), "reference_node": "host-1"}
    launch = Launch.unpack(build_request(values_with(**values), "batch", None).launch)
    run_config = resolve(options_with(**values), launch, datastore="s3://bucket/root")
    assert (run_config.reference or {})["p5.48xlarge"]["CPU governor"] == "performance"
    assert run_config.options.reference_node is None, "the nodes look for it in vain"
    with pytest.raises(UserError, match=r"made with --reference-settings .*right\.json of host-1"):
        resolve(options_with(reference_settings="other.json"), launch, datastore="s3://bucket/root")
    with pytest.raises(UserError, match="has no settings of host-9"):
        build_request(values_with(**{**values, "reference_node": "host-9"}), "batch", None)


def test_a_reference_node_is_passed_on_and_refused_if_all_nodes_are_on_one_host() -> None:
    launch = Launch.unpack(build_request(values_with(reference_node="h1"), "kubernetes", 8).launch)
    config = resolve(options_with(reference_node="h1"), launch, datastore="s3://bucket/root")
    assert (config.options.reference_node, config.reference) == ("h1", None)
    with pytest.raises(UserError, match="--reference-node h1 needs several hosts"):
        build_request(values_with(reference_node="h1"), "local", None)


def test_thresholds_too_large_to_send_are_refused(tmp_path: Path) -> None:
    rows = [f"system-{os.urandom(20).hex()},gemm_fp32,1,{os.urandom(20).hex()}\n" for _ in range(200)]
    (tmp_path / "own.csv").write_text("system,op,floor,source\n" + "".join(rows))
    with pytest.raises(UserError, match="too large for a run"):
        build_request(values_with(thresholds=str(tmp_path / "own.csv")), "batch", None)


def test_a_deployment_cannot_change_its_number_of_gpus() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    with pytest.raises(UserError, match="8 GPUs per node, not 4"):
        resolve(options_with(gpus_per_node=4), launch, datastore="s3://bucket/root")
