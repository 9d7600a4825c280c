"""All outputs of a run: impossible ones are refused first, failures are reported in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checklist.outputs.publish import Outputs, Report, check, publish
from checklist.outputs.webhook import URL_VARIABLE
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs
from tests.checklist.servers import SECRET, Api, hook, kubeconfig, nodes_api


@pytest.fixture(scope="module")
def failing() -> Result:
    share = {2: 0.25}
    return judge(with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share)))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    served = Api(8)
    with nodes_api(served) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        yield served


def reported(reports: tuple[Report, ...]) -> dict[str, tuple[bool, str]]:
    return {item.output: (item.failed, " ".join(item.lines)) for item in reports}


def test_every_requested_output_gets_the_result(
    failing: Result, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(
        webhook=True,
        prometheus=tmp_path / "checklist.prom",
        cloudwatch=str(tmp_path / "emf.log"),
        mark="taint",
        apply=True,
        cluster="prod",
    )
    with hook() as (url, received):
        monkeypatch.setenv(URL_VARIABLE, url)
        assert check(outputs) == ()
        assert received == [], "asking whether it is there sends no message"
        reports = publish(failing, outputs)

    assert not any(item.failed for item in reports)
    assert api.marked() == ["host-2"]
    assert received[0]["text"].startswith("Checklist of prod: FAIL.")
    assert 'training_checklist_verdict{cluster="prod"} 2.0' in (tmp_path / "checklist.prom").read_text()
    assert json.loads((tmp_path / "emf.log").read_text())["Cluster"] == "prod"
    assert SECRET not in repr(reports)


def test_cloudwatch_lines_are_appended_to_a_file_or_written_to_standard_output(
    failing: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        publish(failing, Outputs(cloudwatch=str(tmp_path / "emf.log")))
    assert len((tmp_path / "emf.log").read_text().splitlines()) == 2
    publish(failing, Outputs(cloudwatch="-"))
    assert json.loads(capsys.readouterr().out)["Verdict"] == 2


def test_a_failing_output_is_reported_in_one_line_and_all_others_get_the_result(
    failing: Result, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:9/services/{SECRET}")
    (tmp_path / "taken.prom").mkdir()
    api.refuse["PATCH"] = 403
    outputs = Outputs(
        webhook=True,
        prometheus=tmp_path / "taken.prom",
        cloudwatch=str(tmp_path / "emf.log"),
        mark="label",
        apply=True,
    )

    assert check(outputs) == (
        "Nodes could not be marked now. This account may not patch the nodes of the cluster. It needs a "
        'ClusterRole with verbs ["get", "list", "patch"] on resources ["nodes"], bound to this account.',
        f"The webhook in ${URL_VARIABLE} cannot be reached: no connection (ConnectionRefusedError).",
    )
    reports = reported(publish(failing, outputs))

    assert {output: failed for output, (failed, _) in reports.items()} == {
        "prometheus": True,
        "cloudwatch": False,
        "nodes": True,
        "webhook": True,
    }
    assert "taken.prom cannot be written" in reports["prometheus"][1]
    assert "This account may not patch the nodes" in reports["nodes"][1]
    assert "could not be called" in reports["webhook"][1]
    assert SECRET not in repr(reports)


def test_an_unexpected_exception_of_an_output_is_reported_without_its_message(
    failing: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("checklist.outputs.webhook.send", broken)
    (report,) = publish(failing, Outputs(webhook=True))
    assert report == Report(output="webhook", failed=True, lines=("Unexpected RuntimeError.",))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"most_share": 2}, "--most-share 2 must be from 0 to 1."),
        ({"apply": True}, "--apply applies to marks on nodes, and none is requested."),
        ({"cluster": " "}, "The cluster's name is empty."),
        ({"prometheus": Path("/nowhere/a.prom")}, "--prometheus /nowhere/a.prom cannot be written."),
        ({"prometheus": Path("a.txt")}, "--prometheus 'a.txt' does not end in .prom."),
        ({"webhook": True}, f"--webhook: ${URL_VARIABLE} is not set."),
        ({"mark": "taint", "context": "prod"}, "There is no context 'prod' in the kubeconfig"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_impossible_outputs_are_refused_before_measuring(
    values: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:9")))
    with pytest.raises(UserError) as error:
        check(Outputs(**values))
    assert error.value.problem.startswith(line)
    assert error.value.advice


def test_an_invalid_webhook_address_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in (SECRET, f"ftp://{SECRET}", f"http://[{SECRET}", "https://"):
        monkeypatch.setenv(URL_VARIABLE, address)
        with pytest.raises(UserError, match=r"is not an http\(s\) address") as error:
            check(Outputs(webhook=True))
        assert "SECRET" not in str(error.value)
