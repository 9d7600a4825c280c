"""A run on AWS Batch is planned with the machines of its compute environments. Uses moto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decorators._metaflow import UserValue
from decorators.backends.batch import inventory
from decorators.backends.destination import planning_for
from decorators.backends.interface import Destination
from decorators.backends.options import Options
from estimator import Job, Target
from estimator.errors import UserError
from estimator.models import find
from estimator.planning.goals import Goals
from estimator.planning.planner import plan
from flows.finetune import artifacts, planning

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("account")]

LORA = Job(model=find("llama-8b"), method="lora", engine="torchtune")
Queue = Callable[..., str]


def _read(queue: str | None = None, **overrides: Any) -> Any:
    return inventory.read(Destination(backend="batch", options=Options(queue=queue, **overrides)))


def _machines(cluster: Any) -> set[str]:
    return {nodes.instance.name for nodes in cluster.nodes}


def test_instance_families_and_types_of_a_queue_become_machines_within_its_vcpu_limit(queue: Queue) -> None:
    inventory_read = _read(queue(instanceTypes=["g6e", "p5.48xlarge", "optimal"], maxvCpus=400))
    assert "p5.48xlarge" in _machines(inventory_read)
    assert {name.partition(".")[0] for name in _machines(inventory_read)} == {"g6e", "p5"}
    rooms = {nodes.instance.name: nodes.max_new_nodes for nodes in inventory_read.nodes}
    assert rooms["p5.48xlarge"] == 2  # of 192 vCPUs
    small = _read(queue("small", instanceTypes=["p5.48xlarge", "g6e.xlarge"], maxvCpus=96))
    assert _machines(small) == {"g6e.xlarge"}


def test_a_plan_uses_only_machine_types_and_counts_that_the_queue_can_start(queue: Queue) -> None:
    cluster = _read(queue(instanceTypes=["g6e.12xlarge"], maxvCpus=96))
    spot_plan = plan(LORA, Target(kind="batch"), Goals(cluster=cluster))
    assert spot_plan.request.instance_type == "g6e.12xlarge"
    assert spot_plan.request.nodes <= 2
    assert spot_plan.request.cpu <= 48
    assert any(
        "compute environment gpus-environment may add 2 of g6e.12xlarge" in line for line in spot_plan.why
    )


def test_a_spot_plan_has_one_node_at_the_spot_price(queue: Queue) -> None:
    (nodes,) = _read(queue(type="SPOT", instanceTypes=["p5.48xlarge"])).nodes
    assert (nodes.spot, nodes.max_new_nodes) == (True, 1)


def test_a_spot_request_on_an_on_demand_queue_names_the_spot_queue(queue: Queue) -> None:
    cluster = _read(queue("on-demand", instanceTypes=["g6e.12xlarge"]))
    assert cluster.spot_queues == ()
    queue("spot", type="SPOT", instanceTypes=["g6e.12xlarge"])
    queue("stopped", type="SPOT", state="DISABLED", instanceTypes=["g6e.12xlarge"])
    with pytest.raises(UserError, match="matches --spot") as refused:
        plan(LORA, Target(kind="batch"), Goals(cluster=_read("on-demand"), spot=True))
    assert refused.value.advice == "Use a queue with spot machines: --queue spot"


def test_a_queue_configured_for_a_gpu_provides_only_that_gpu(queue: Queue) -> None:
    queue("h100", instanceTypes=["p5.48xlarge", "g6e.xlarge"])
    queue("l40s", instanceTypes=["g6e.xlarge", "g5.xlarge"])
    inventory_read = _read(queues=(("H100", "h100"), ("L40S", "l40s")))
    assert _machines(inventory_read) == {"p5.48xlarge", "g6e.xlarge"}
    assert inventory_read.where == "AWS Batch queues h100, l40s"
    assert _machines(_read("l40s", queues=(("H100", "h100"),))) == {"g6e.xlarge", "g5.xlarge"}


def test_the_queue_of_the_step_takes_precedence_over_all_others(queue: Queue) -> None:
    queue("h100", instanceTypes=["p5.48xlarge"])
    queue("own", instanceTypes=["g6e.xlarge"])
    user_values = {"queue": UserValue(value="own", by="--with batch:queue=")}
    destination = Destination(
        backend="batch", options=Options(queues=(("H100", "h100"),)), user_values=user_values
    )
    assert _machines(inventory.read(destination)) == {"g6e.xlarge"}
    named = Destination(backend="batch", configured={"queue": "h100"})
    assert _machines(inventory.read(named)) == {"p5.48xlarge"}


def test_a_disabled_environment_is_ignored_and_a_missing_queue_is_named(queue: Queue) -> None:
    inventory_read = _read(queue(environment="DISABLED"))
    assert inventory_read.nodes == ()
    assert inventory_read.skipped[0].names == ("gpus-environment",)
    with pytest.raises(UserError, match="There is no AWS Batch queue reserch in us-east-1"):
        _read("reserch")


def test_the_first_enabled_queue_is_used_if_none_is_configured(queue: Queue) -> None:
    with pytest.raises(UserError, match="No AWS Batch queue is named, and the region has no enabled queue"):
        _read()
    queue("any", instanceTypes=["g6e.xlarge"])
    assert _read().context == "any"


def test_run_with_batch_plans_with_the_machines_of_the_queue(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(artifacts, "stage", lambda _, model: (model, {}))
    monkeypatch.setattr(artifacts, "carry", lambda *_: None)
    queue("own", instanceTypes=["g5"])

    def run(name: str, **parameters: Any) -> Any:
        with planning_for(Destination(backend="batch", options=Options(queue=name))):
            return planning.plan_from_parameters(
                {"model": "llama-8b", "method": "lora", **parameters}, "batch"
            )

    assert run("own", gpu="A10G").request.instance_type.startswith("g5.")
    with pytest.raises(UserError, match="No node of AWS Batch queue own matches --gpu H100: it has"):
        run("own", gpu="H100")
    capsys.readouterr()
    assert run("own", gpu="H100", from_catalogue=True).request.instance_type.startswith("p5")
    assert run("none", gpu="H100").request.instance_type.startswith("p5")
    output = capsys.readouterr().err
    assert "Planned with the catalogue's machines: --from-catalogue." in output
    assert "Planned with the catalogue's machines: There is no AWS Batch queue none in us-east-1." in output
