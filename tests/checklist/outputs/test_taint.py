"""Taints on faulty nodes: only on request, never too many, removed only after a later pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checklist.measurements import Measurements
from checklist.outputs import taint
from checklist.outputs.publish import Outputs
from checklist.outputs.publish import publish as publish_to
from checklist.outputs.taint import EFFECT, KEY, LABEL, publish
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs, with_share
from tests.checklist.servers import OTHERS_TAINT, Api, kubeconfig, nodes_api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    served = Api(8)
    with nodes_api(served) as url:
        use(kubeconfig(tmp_path, url), monkeypatch)
        yield served


def use(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(file))
    # The client reads this when it is first imported
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


def slow(*nodes: int, run: Measurements | None = None, **changes: Any) -> Result:
    share = dict.fromkeys(nodes, 0.25)
    return judge(
        with_pairs(run or gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share)), **changes
    )


def test_nodes_are_not_tainted_unless_requested(api: Api) -> None:
    lines = publish(slow(2))
    assert lines[0].startswith(
        "host-2: would be marked as unfit (taint), but this is a dry run. host-2 is slow"
    )
    assert (api.marked(), api.patches) == ([], [])


def test_a_bad_node_is_tainted_and_keeps_the_taints_of_others(api: Api) -> None:
    publish(slow(2), apply=True)
    assert api.marked() == ["host-2"]
    assert api.taints("host-2") == [OTHERS_TAINT, {"key": KEY, "value": "true", "effect": EFFECT}]
    assert api.nodes["host-2"]["metadata"]["labels"] == {"zone": "a"}
    assert api.patches[0][1] in ("application/merge-patch+json", "application/strategic-merge-patch+json")


def test_tainting_is_idempotent(api: Api) -> None:
    publish(slow(2), apply=True)
    assert publish(slow(2), apply=True) == ()
    assert len(api.patches) == 1


def test_no_node_is_tainted_if_more_than_the_allowed_share_fails(api: Api) -> None:
    lines = publish(slow(1, 2, 3), apply=True)
    assert api.marked() == []
    assert lines == (
        "host-1, host-2, host-3: not marked, as 3 of 8 nodes would be, more than 25% (2). "
        "Look for a common cause first.",
    )
    publish(slow(1, 2, 3), apply=True, most_share=0.5)
    assert api.marked() == ["host-1", "host-2", "host-3"]


def test_tainted_nodes_count_toward_the_allowed_share(api: Api) -> None:
    publish(slow(1, 2), apply=True)
    publish(slow(3), apply=True)
    assert api.marked() == ["host-1", "host-2"]


def test_a_taint_is_removed_only_by_a_later_pass_of_an_equally_strict_check(api: Api) -> None:
    publish(slow(2), apply=True)
    weaker = judge(gpu_run(8, profile="quick", started_unix=2_000.0))
    without = judge(gpu_run(8, pairs=(), started_unix=2_000.0))
    elsewhere = judge(gpu_run(2, started_unix=2_000.0))
    beside = judge(gpu_run(8))
    for result in (weaker, without, elsewhere, beside):
        assert publish(result, apply=True) == ()
        assert api.marked() == ["host-2"]
    lines = publish(judge(gpu_run(8, profile="deep", started_unix=2_000.0)), apply=True)
    assert lines == ("host-2: no longer marked (taint).",)
    assert (api.marked(), api.taints("host-2")) == ([], [OTHERS_TAINT])
    assert KEY not in api.nodes["host-2"]["metadata"]["annotations"]


def test_a_second_failure_is_added_to_the_taint_and_both_must_be_cleared(api: Api) -> None:
    publish(slow(2), apply=True)
    run = gpu_run(8)
    broken = judge(dataclasses.replace(with_share(run, 0.7, range(16, 24)), pairs=()))
    assert broken.bad_nodes == ("host-2",)
    publish(broken, apply=True)
    taint_value = json.loads(api.nodes["host-2"]["metadata"]["annotations"][KEY])
    assert {item["check"] for item in taint_value} == {"pairs", "gemm", "hbm"}
    later = dataclasses.replace(run, started_unix=2_000.0)
    publish(judge(dataclasses.replace(later, pairs=())), apply=True)
    assert api.marked() == ["host-2"], "the pairs have not been measured again"
    publish(judge(later), apply=True)
    assert api.marked() == []


def test_taints_of_other_tools_are_kept(api: Api) -> None:
    api.nodes["host-5"]["spec"]["taints"].append({"key": KEY, "value": "true", "effect": EFFECT})
    assert publish(judge(gpu_run(8)), apply=True) == ()
    assert api.marked() == ["host-5"]


def test_healthy_nodes_get_a_label_for_equality_selectors(api: Api) -> None:
    publish(slow(2), apply=True, method="label")
    fit = {name: node["metadata"]["labels"].get(LABEL) for name, node in api.nodes.items()}
    assert fit == {f"host-{number}": "false" if number == 2 else "true" for number in range(8)}
    assert api.marked() == [], "no taint"
    publish(judge(gpu_run(8, started_unix=2_000.0)), apply=True, method="label")
    assert {node["metadata"]["labels"][LABEL] for node in api.nodes.values()} == {"true"}


def test_a_node_of_another_cluster_is_not_tainted(api: Api) -> None:
    del api.nodes["host-2"]
    assert publish(slow(2), apply=True) == ("host-2 is no node of this cluster: it is not marked.",)


@pytest.mark.parametrize(("verb", "expected"), [("GET", "list"), ("PATCH", "patch")])
def test_without_permission_the_missing_rule_is_named(api: Api, verb: str, expected: str) -> None:
    api.refuse[verb] = 403
    with pytest.raises(UserError) as error:
        publish(slow(2), apply=True)
    assert error.value.problem == f"This account may not {expected} the nodes of the cluster."
    assert 'a ClusterRole with verbs ["get", "list", "patch"] on resources ["nodes"]' in error.value.advice


def test_other_api_errors_are_reported_in_one_line(api: Api) -> None:
    for status, message in ((401, "does not accept this login"), (500, "answers with status 500")):
        api.refuse["GET"] = status
        with pytest.raises(UserError, match=message):
            publish(slow(2), apply=True)


def test_a_concurrently_changed_node_is_not_overwritten(api: Api) -> None:
    cluster = taint.Cluster()
    (change,) = taint.changes(slow(2), cluster.nodes()).changes
    api.nodes["host-2"]["metadata"]["resourceVersion"] = "7"
    with pytest.raises(UserError, match="Another client changed the node"):
        cluster.patch(change, "taint")
    assert api.marked() == []


def test_a_node_changed_concurrently_is_read_again_and_tainted(api: Api) -> None:
    api.writers["host-2"] = 2
    (line,) = publish(slow(2), apply=True)
    assert line.startswith("host-2: marked as unfit (taint). host-2 is slow")
    assert api.marked() == ["host-2"]
    assert api.nodes["host-2"]["metadata"]["annotations"]["seen"] == "0", "the others' change is kept"


def test_a_concurrently_tainted_node_is_not_tainted_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    original_patch = taint.Cluster.patch

    def late(self: taint.Cluster, change: taint.NodeChange, how: taint.MarkKind) -> None:
        monkeypatch.setattr(taint.Cluster, "patch", original_patch)
        publish(slow(2), apply=True)  # another run, with the same verdict
        original_patch(self, change, how)

    monkeypatch.setattr(taint.Cluster, "patch", late)
    assert publish(slow(2), apply=True) == ()
    assert (api.marked(), len(api.patches)) == (["host-2"], 1)


def test_other_nodes_are_tainted_if_one_cannot_be(api: Api) -> None:
    api.writers["host-1"] = 1000
    with pytest.raises(taint.NotAllMarkedError) as error:
        publish(slow(1, 2), apply=True)
    first, second = error.value.lines
    assert first == ("host-1: left as it is. Another client changed the node in the meantime. Run it again.")
    assert second.startswith("host-2: marked as unfit (taint).")
    assert api.marked() == ["host-2"]
    (report,) = publish_to(slow(1, 2), Outputs(mark="taint", apply=True))
    assert (report.failed, report.lines) == (True, (first,)), "host-2 is marked already"


def test_taints_set_before_an_api_error_are_reported(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    original_patch = taint.Cluster.patch

    def once(self: taint.Cluster, change: taint.NodeChange, how: taint.MarkKind) -> None:
        original_patch(self, change, how)
        api.refuse["PATCH"] = 403

    monkeypatch.setattr(taint.Cluster, "patch", once)
    (report,) = publish_to(slow(1, 2), Outputs(mark="taint", apply=True))
    assert report.failed
    assert report.lines[0].startswith("host-1: marked as unfit (taint).")
    assert report.lines[1].startswith(
        "host-2: left as it is. This account may not patch the nodes of the cluster."
    )


def test_an_unreachable_cluster_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(kubeconfig(tmp_path, "http://127.0.0.1:9"), monkeypatch)
    with pytest.raises(UserError, match="be reached"):
        publish(slow(2))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="There is no kubeconfig at"):
        publish(slow(2))
