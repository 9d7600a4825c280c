"""EFA on each host: working, failing, or not tried."""

from __future__ import annotations

import dataclasses

from checklist.measurements import Local, Measurements
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.runs import all_with, gpu_run, verdict_of


def efa_run(*reported: float | str) -> Measurements:
    """Return a run whose nodes have reported a value or an error each."""
    run = gpu_run(len(reported))
    loopbacks = tuple(
        Local(
            rank=8 * node,
            what="efa_loopback",
            value=None if isinstance(one, str) else one,
            unit="GB/s",
            error=one if isinstance(one, str) else None,
        )
        for node, one in enumerate(reported)
    )
    return dataclasses.replace(run, locals=(*run.locals, *loopbacks))


def reason(result: Result) -> str:
    check = result.check("efa")
    return check.reason


def test_efa_passes_if_messages_arrive_at_any_speed() -> None:
    result = judge(efa_run(15.4, 0.1))
    check = result.check("efa")
    assert (check.verdict, len(check.figures), check.nodes) == ("PASS", 2, ("host-0", "host-1"))


def test_a_host_that_cannot_reach_itself_over_efa_fails_with_the_reason() -> None:
    (fault,) = judge(efa_run(15.4, "fi_pingpong did not end within 8 s")).findings
    assert (fault.verdict, fault.nodes) == ("FAIL", ("host-1",))
    assert (
        fault.title
        == "EFA does not deliver a message from host-1 to itself: fi_pingpong did not end within 8 s."
    )


def test_efa_has_no_verdict_without_its_tool() -> None:
    nowhere = judge(efa_run("there is no fi_pingpong", "there is no fi_pingpong"))
    assert (verdict_of(nowhere, "efa"), nowhere.verdict) == ("NO-VERDICT", "PASS")
    one = judge(efa_run(15.4, "there is no fi_pingpong"))
    assert (verdict_of(one, "efa"), reason(one)) == ("NO-VERDICT", "There is no fi_pingpong on host-1.")


def test_efa_is_skipped_without_devices_and_has_no_verdict_if_unmeasured() -> None:
    assert verdict_of(judge(all_with(gpu_run(2), efa_devices=0)), "efa") == "skipped"
    assert verdict_of(judge(gpu_run(2)), "efa") == "NO-VERDICT"
