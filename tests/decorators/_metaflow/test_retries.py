"""Retries of a deployed step: their number, and which failures end them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from decorators._metaflow import endings, retries
from decorators._metaflow.retries import RETRIES
from decorators.backends.disruptions import Disruptions
from estimator.planning.goals import ATTEMPTS
from launchers.gang.failures import Failure, Kind
from launchers.store.bundles import LocalStorage


def test_spot_plans_assume_the_retries_of_the_deployed_step() -> None:
    assert ATTEMPTS == RETRIES


@pytest.mark.parametrize(
    ("ends", "deployed", "forbidden"),
    [
        (("rank", "rank"), True, False),
        (("rank", "rank", "rank"), True, True),
        (("node", "rank", "left", "rank"), True, False),  # lost nodes and drained ones are no failures
        (("rank", "rank", "rank"), False, False),  # there each attempt is a failure
    ],
)
def test_a_deployed_step_is_retried_as_often_as_its_decorator_allows(
    ends: tuple[Kind, ...], deployed: bool, forbidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SimpleNamespace(decorators=[SimpleNamespace(name="retry", attributes={"times": "2"})])
    context = SimpleNamespace(
        flow=SimpleNamespace(train=step), max_user_code_retries=RETRIES if deployed else 2
    )
    monkeypatch.setattr(retries, "system_context", context)
    monkeypatch.setattr(endings, "_retry_forbidden", False)
    disruptions = Disruptions(storage=LocalStorage(tmp_path), run="7")
    for launch, kind in enumerate(ends):
        disruptions.record_gang_end("train", launch, Failure.now(kind, 0, "host", "it ended"))
    retries.limit_failures("train", disruptions.failures("train", len(ends)))
    assert endings._retry_forbidden is forbidden
