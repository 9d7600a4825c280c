"""Planning: from parameters to a plan, and refusals."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checklist.verdict import judge
from decorators.backends import destination
from estimator import calibration
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from flows.cluster_check import gate
from flows.finetune import artifacts, flags, planning
from flows.finetune.planning import Backend
from tests.estimator.planning.test_clusters import nodes_of
from tests.flows.cluster_check.test_gate import checked, healthy
from tests.lab.configs import config

PARAMETERS = {"model": "tiny-llama", "global_batch_size": 8}
Usage = namedtuple("Usage", "total used free")


def test_a_plan_for_a_local_dataset_has_its_number_of_steps_and_reads_all_rows(dataset: Path) -> None:
    planned = planning.plan_from_parameters({**PARAMETERS, "dataset": str(dataset)}, "local")
    assert planned.layout.global_batch_size == 8
    dataset.write_text(dataset.read_text() + "{broken\n")
    with pytest.raises(UserError, match="line 61"):
        planning.plan_from_parameters({**PARAMETERS, "dataset": str(dataset)}, "local")


def test_a_disk_without_free_space_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**30, 2**30, 1000))
    with pytest.raises(UserError, match="FINETUNE_WORK_DIR") as caught:
        planning.plan_from_parameters(PARAMETERS, "local")
    assert "0 MiB free" in caught.value.problem


def test_a_datastore_on_another_disk_without_free_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datastore = Path("/dev/shm") / tmp_path.name / ".metaflow"
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("the work folder is in /dev/shm too")
    free = {Path("/dev/shm"): 1000}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, free.get(folder, 2**40)))
    monkeypatch.setattr(planning, "local_datastore", lambda: datastore)
    with pytest.raises(UserError, match="METAFLOW_DATASTORE_SYSROOT_LOCAL") as caught:
        planning.plan_from_parameters(PARAMETERS, "local")
    assert caught.value.problem.startswith(f"The datastore {datastore} has 0 MiB free; ")
    monkeypatch.setattr(planning, "local_datastore", lambda: tmp_path)
    planning.plan_from_parameters(PARAMETERS, "local")


def test_a_file_at_the_output_path_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    for folder in (tmp_path / "results", tmp_path / "results" / "mine"):
        with pytest.raises(UserError) as caught:
            planning.plan_from_parameters({**PARAMETERS, "output_dir": str(folder)}, "local")
        assert str(caught.value) == (
            f"--output-dir {folder}: {tmp_path / 'results'} is a file.\n"
            "Choose another folder: --output-dir FOLDER"
        )


def test_finished_runs_correct_the_plan_unless_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "runs.jsonl"))
    before = planning.plan_from_parameters(PARAMETERS, "local").prediction.memory
    calibration.Store().add(
        calibration.Finished(
            engine="torchtune",
            method="full",
            gpu="cpu",
            model="tiny-llama",
            setup="",
            formulas=calibration.formulas("torchtune", "full"),
            predicted_bytes=10**9,
            predicted_upper_bytes=13 * 10**8,
            measured_bytes=12 * 10**8,
            measured_kind="resident",
            date="2026-01-02T03:04:05+00:00",
            run="FinetuneFlow/1/train/2",
        )
    )
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write("half a li")
    capsys.readouterr()
    after = planning.plan_from_parameters({**PARAMETERS, "device": "cpu"}, "local").prediction.memory
    assert after.shows_bytes > before.shows_bytes
    assert after.uncorrected.categories == before.categories
    assert "calibrated on 1 run: scaled by 1.06" in after.shows_basis
    assert "Skipped line 2" in capsys.readouterr().err
    plain = planning.plan_from_parameters({**PARAMETERS, "no_calibration": True}, "local")
    assert plain.prediction.memory.shows_bytes == before.shows_bytes


ON_CLUSTER = {"model": "llama-8b", "method": "lora", "engine": "torchtune"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[Cluster | UserError]:
    """Responses of the backend; the first is used. Nothing is uploaded for remote tasks."""
    p5 = nodes_of("p5.48xlarge", 2)
    answers: list[Cluster | UserError] = [Cluster(context="training", nodes=(p5,))]

    def read(*_: object) -> Cluster:
        if isinstance(answers[0], UserError):
            raise answers[0]
        return answers[0]

    monkeypatch.setattr(destination, "read_cluster", read)
    monkeypatch.setattr(artifacts, "stage", lambda _, model: (model, {}))
    monkeypatch.setattr(artifacts, "carry", lambda *_: None)
    return answers


@pytest.mark.parametrize("backend", ["kubernetes", "batch"])
def test_a_remote_run_is_planned_with_the_nodes_of_the_cluster(
    cluster: list[Cluster], backend: Backend
) -> None:
    planned = planning.plan_from_parameters(ON_CLUSTER, backend)
    assert (planned.request.instance_type, planned.target) == ("p5.48xlarge", backend)
    assert any("the cluster has 2 of p5.48xlarge" in line for line in planned.why)


def test_an_unreachable_cluster_is_reported_in_one_line(
    cluster: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster[0] = UserError("The API cannot be reached: refused.", "Is the VPN up?")
    planned = planning.plan_from_parameters(ON_CLUSTER, "kubernetes")
    assert planned.request.instance_type is not None
    warnings = [line for line in capsys.readouterr().err.splitlines() if "catalogue" in line]
    assert warnings == ["Planned with the catalogue's machines: The API cannot be reached: refused."]


def test_from_catalogue_is_a_flag_without_a_value_and_a_setting(
    cluster: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    in_file = {"resources": {"from_catalogue": True}}
    for values, meant in (({}, False), ({"from_catalogue": True}, True)):
        assert flags.settings_from({}, values).resources.from_catalogue is meant
        assert flags.settings_from(in_file, values).resources.from_catalogue
    assert flags.settings_from(in_file, {"from_catalogue": False}).resources.from_catalogue
    cluster[0] = UserError("Nobody is to be asked.")
    planning.plan_from_parameters({**ON_CLUSTER, "from_catalogue": True}, "kubernetes")
    assert "--from-catalogue" in capsys.readouterr().err


@pytest.mark.parametrize("parameters", [{"device": "cpu", "model": "tiny-llama", "method": "full"}])
def test_a_run_on_cpus_reads_no_inventory_of_gpus(
    cluster: list[Any], parameters: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster[0] = UserError("Nobody is to be asked.")
    planned = planning.plan_from_parameters({**ON_CLUSTER, **parameters}, "kubernetes")
    assert planned.layout.device == "cpu"
    assert "catalogue" not in capsys.readouterr().err


def test_a_deployment_that_is_only_printed_queries_no_cluster(
    cluster: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("decorators._metaflow.compiles_only", lambda: True)
    cluster[0] = UserError("Nobody is to be asked.")
    planning.plan_from_parameters(ON_CLUSTER, "kubernetes")
    assert (
        "Planned with the catalogue's machines: --only-json contacts no cluster." in capsys.readouterr().err
    )


def test_a_resumed_run_keeps_its_original_plan(cluster: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = planning.plan_from_parameters({**ON_CLUSTER, "gpus": 4}, "kubernetes")
    busy = nodes_of("p5.48xlarge", 1)
    cluster[0] = Cluster(context="training", nodes=(busy,))
    monkeypatch.setattr(planning, "command", lambda: "resume")
    monkeypatch.setattr(planning, "_newest_checklist", lambda *_, **__: None)
    earlier_plans: list[Any] = [first]
    monkeypatch.setattr(planning, "resumed_artifact", lambda *_: earlier_plans[0])
    assert planning.plan_from_parameters(ON_CLUSTER, "kubernetes") == first
    earlier_plans[0] = None  # its step start has not ended
    assert planning.plan_from_parameters(ON_CLUSTER, "kubernetes") != first


def test_a_spot_run_uses_only_spot_nodes_and_the_checkpoint_interval_of_its_plan(
    cluster: list[Cluster],
) -> None:
    with pytest.raises(UserError) as caught:
        planning.plan_from_parameters({**ON_CLUSTER, "spot": True}, "kubernetes")
    assert "matches --spot" in caught.value.problem  # no label marks its nodes
    cluster[0] = Cluster(context="training", nodes=(replace(nodes_of("p5.48xlarge", 2), spot=True),))
    rate = {"set": ("resources.interruption_rate=0.05",)}
    planned = planning.plan_from_parameters({**ON_CLUSTER, "spot": True, **rate}, "kubernetes")
    interruptions = planned.prediction.interruptions
    assert planned.request.spot
    assert planned.prediction.price_kind == "spot"
    assert interruptions.steps is not None
    for values, every in (({}, interruptions.steps), ({"checkpoint_every": 7}, 7)):
        decided = config({**ON_CLUSTER, **values}, "llama-8b").with_checkpoint_interval(1000, planned)
        assert decided.checkpoint_every == every
    assert not planning.plan_from_parameters({**PARAMETERS, "spot": True}, "local").request.spot


def test_several_nodes_on_spot_are_refused_on_batch(cluster: list[Cluster]) -> None:
    cluster[0] = Cluster(context="queue", nodes=(replace(nodes_of("p5.48xlarge", 2), spot=True),))
    with pytest.raises(UserError, match="--nodes 2: AWS Batch runs multi-node jobs on demand only"):
        planning.plan_from_parameters({**ON_CLUSTER, "spot": True, "nodes": 2}, "batch")
    assert planning.plan_from_parameters({**ON_CLUSTER, "spot": True}, "batch").request.nodes == 1


def test_measured_bandwidth_and_the_label_of_healthy_nodes_are_part_of_the_plan(
    cluster: list[Cluster], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"model": "llama-70b", "method": "full", "nodes": 2, "global_batch_size": 64}
    before = planning.plan_from_parameters(parameters, "kubernetes")
    result = healthy()
    slow = [replace(item, busbw_gbytes_per_s=20.0) for item in result.measurements.collectives]
    checked_result = checked(judge(replace(result.measurements, collectives=tuple(slow))))
    exclusion = gate.NodeExclusion(labels=(("fit", "true"),), lines=("Excluded: host-2.",))
    monkeypatch.setattr(planning, "_newest_checklist", lambda *_, **__: checked_result)
    monkeypatch.setattr(gate, "exclude_nodes", lambda *_: exclusion)
    after = planning.plan_from_parameters(parameters, "kubernetes")
    assert any("between nodes 20 GB/s as measured" in line for line in after.why)
    assert after.prediction.tokens_per_second < 0.8 * before.prediction.tokens_per_second
    assert (before.request.node_labels, after.request.node_labels) == ((), (("fit", "true"),))
    assert "Excluded: host-2." in capsys.readouterr().err
    monkeypatch.setattr(type(checked_result), "covers", lambda *_: False)
    other = planning.plan_from_parameters(parameters, "kubernetes")
    assert other.prediction == before.prediction, "measured on another instance type"
