"""Plans of ``run --with kubernetes`` on clusters of different shapes, their messages, and admission."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decorators.backends.destination import planning_for
from decorators.backends.interface import Destination
from estimator import hardware
from estimator.errors import CannotFit, UserError
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Plan
from flows.finetune import artifacts, planning
from tests.flows.clusters import FENCE, GPU_TAINT, Shape, cpu_node, gke, holding, own_a100, shaped
from tests.lab.control_plane import ControlPlane

pytestmark = pytest.mark.slow

RESEARCH = Toleration(key="dedicated", effect="NoSchedule", value="research")
Run = Callable[..., Plan]


@pytest.fixture
def shape(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Shape]:
    namespace = control_plane.namespace(f"s{abs(hash(request.node.name)) % 10**8}")
    with shaped(control_plane, namespace) as cluster_shape:
        yield cluster_shape


@pytest.fixture
def run(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return the plan of ``run --with kubernetes`` with these parameters, and tolerations of its pods."""
    monkeypatch.setenv("KUBECONFIG", str(shape.plane.kubeconfig()))
    monkeypatch.setattr(artifacts, "stage", lambda _, model: (model, {}))
    monkeypatch.setattr(artifacts, "carry", lambda *_: None)

    def planned(model: str = "llama-8b", *tolerations: Toleration, **parameters: Any) -> Plan:
        values: dict[str, Any] = {"namespace": shape.namespace}
        user_values = {}
        if tolerations:
            values["tolerations"] = [item.to_dict() for item in tolerations]
            user_values["tolerations"] = object()
        destination = Destination(backend="kubernetes", configured=values, user_values=user_values)  # type: ignore[arg-type]
        with planning_for(destination):
            return planning.plan_from_parameters({"model": model, **parameters}, "kubernetes")

    return planned


def test_an_on_premises_plan_uses_only_untainted_nodes_and_has_no_price(
    shape: Shape,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    shape.add(
        own_a100("fenced-a", taints=[FENCE, GPU_TAINT]),
        own_a100("fenced-b", taints=[FENCE, GPU_TAINT]),
        own_a100("cordoned", unschedulable=True),
    )
    with pytest.raises(UserError) as caught:
        run(method="lora")
    assert "have the untolerated taint dedicated=research:NoSchedule" in caught.value.problem
    assert "8x A100 SXM 80GB of fenced-a, fenced-b" in caught.value.problem
    opening = caught.value.advice.partition("--with ")[2]
    assert '{"key":"dedicated","operator":"Equal","effect":"NoSchedule","value":"research"}' in opening
    assert '"nvidia.com/gpu"' in opening  # what the user writes stands instead of what the table tolerates
    assert not isinstance(caught.value, CannotFit)

    both = (RESEARCH, Toleration(key="nvidia.com/gpu", effect="NoSchedule"))
    plan = run("llama-8b", *both, method="lora")
    lines = capsys.readouterr().err
    assert "Skipped, unschedulable (cordoned): cordoned" in lines
    assert (plan.request.gpu_type, plan.request.cloud) == ("A100 SXM 80GB", "cluster")
    assert plan.prediction.usd_per_hour is None
    assert "Price       unknown" in lines
    assert plan.request.cpu < 256
    assert shape.preflight(plan, both)[0].impossible == []
    assert shape.admitted(plan, both)[0] in ("fenced-a", "fenced-b")

    shape.add(own_a100("open"))
    price_file = tmp_path / "own.csv"
    price_file.write_text(
        "instance_type,cloud,gpu,gpu_count,on_demand_usd_h\n8x A100 SXM 80GB,rack,A100 SXM 80GB,8,9.5\n"
    )
    monkeypatch.setenv(hardware.VARIABLE, str(price_file))
    hardware.clear_cache()
    priced = run(method="lora", gpus=8)
    assert priced.prediction.usd_per_hour == 9.5
    reported = capsys.readouterr().err
    assert "untolerated taint dedicated=research:NoSchedule: fenced-a, fenced-b" in reported
    hardware.clear_cache()


def test_an_empty_node_group_is_used_in_a_plan_if_the_user_describes_it(
    shape: Shape, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shape.add(
        gke("cpus-1", "default-pool", "e2-standard-8", "", "7910m", "28Gi"),
        gke("l4-1", "l4", "g2-standard-16", "nvidia-l4", "15890m", "56Gi"),
    )
    with pytest.raises(UserError, match="llama-8b"):
        run(method="full")  # nothing grows, and nobody says that it might
    shape.autoscaler(
        ("https://www.googleapis.com/p/instanceGroups/gke-c-l4-0a1b-grp", 1, 3),
        ("https://www.googleapis.com/p/instanceGroups/gke-c-big-2c3d-grp", 0, 2),
    )
    with pytest.raises(UserError) as caught:
        run(method="full")
    assert "the node group gke-c-big-2c3d-grp may add nodes of an unknown instance type" in str(caught.value)
    assert "name it: --instance-type" in caught.value.advice
    plan = run(method="full", instance_type="a2-ultragpu-4g")
    assert plan.request.instance_type == "a2-ultragpu-4g"
    assert plan.request.nodes <= 2
    rows = shape.preflight(plan)[0]
    assert rows.impossible == []
    assert any("may add nodes to gke-c-l4-0a1b-grp (1 of 3 nodes)" in row.detail for row in rows.rows)
    capsys.readouterr()
    node_plan = run(method="qlora", nodes=2, gpus=1)
    assert (node_plan.request.instance_type, node_plan.request.nodes) == ("g2-standard-16", 2)
    assert "the node group gke-c-l4-0a1b-grp may add 2 of g2-standard-16" in capsys.readouterr().err


def test_a_small_model_is_trained_on_cpus_of_a_cluster_without_gpus_with_a_note(
    shape: Shape, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shape.add(cpu_node("a"), cpu_node("b"))
    plan = run("tiny-llama")
    assert (plan.layout.device, plan.request.gpus_per_node) == ("cpu", 0)
    lines = capsys.readouterr().err
    assert "No GPUs in the cluster of context lab: planned on its CPUs, as with --device cpu." in lines
    assert shape.preflight(plan)[0].impossible == []
    assert shape.admitted(plan)[0] in ("a", "b")
    with pytest.raises(UserError) as caught:
        run(method="lora")
    assert "it has no usable NVIDIA GPU" in caught.value.problem
    assert "--from-catalogue" in caught.value.advice
    shape.add(own_a100("cordoned", unschedulable=True))
    with pytest.raises(UserError, match="--device cpu"):  # its GPUs may be back soon: the user decides
        run("tiny-llama")


def test_a_run_waits_for_busy_gpus_and_names_them(
    shape: Shape, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shape.add(own_a100("a"), own_a100("b"))
    shape.run(holding("train-1", "a", 8))
    shape.run(holding("train-2", "b", 8))
    plan = run(method="lora", gpus=8, nodes=1)
    waits = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("the run waits"))
    names = f"{shape.namespace}/train-1, {shape.namespace}/train-2"
    assert waits == (
        f"the run waits: 16 of these 16 A100 SXM 80GB are in use now, by {names}; "
        "it gives up after 30 minutes."
    )
    findings, _ = shape.preflight(plan)
    assert findings.impossible == []
    assert any("0 with free GPUs: the run will wait" in row.detail for row in findings.rows)
    (pod,) = shape.submit(plan)
    time.sleep(1)
    assert shape.node_of(pod) is None
    shape.end("train-2")
    deadline = time.monotonic() + 60
    while shape.node_of(pod) is None and time.monotonic() < deadline:
        time.sleep(0.3)
    assert shape.node_of(pod) == "b"
    shape.end("train-1")
    findings, _ = shape.preflight(plan)
    assert findings.state("nodes") == "ok", "node a is free"
