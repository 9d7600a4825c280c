"""Backend options of the user: flags, settings and environment variables."""

from __future__ import annotations

from typing import Any

import pytest

from decorators.backends.options import Options
from estimator.errors import UserError


def test_queues_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_QUEUES", "H100=a, A10G=b")
    options = Options.from_values({"settings": {"resources": {"queues": {"A10G": "c"}}, "other": 1}})
    assert (options.queue_for("H100 SXM"), options.queue_for("A10G"), options.queue_for("L4")) == (
        "a",
        "c",
        None,
    )
    assert Options.from_values({"queue": "d"}).queue_for("H100") == "d"
    monkeypatch.setenv("FINETUNE_QUEUES", "H100")
    with pytest.raises(UserError, match="'H100' has no queue"):
        Options.from_values({})
    with pytest.raises(UserError, match="no GPU 'H1000'"):
        Options(queues=(("H1000", "a"),))


def test_flags_and_overrides_reach_the_backend_options() -> None:
    values: dict[str, Any] = {
        "zone": "z",
        "pending_timeout": 5.0,
        "no_preflight": True,
        "set": ("resources.priority=high", "resources.priority_class=research", "optimizer.lr=1e-4"),
    }
    assert Options.from_values(values) == Options(
        zone="z", pending_timeout=5.0, preflight=False, priority="high", priority_class="research"
    )


def test_equal_options_with_a_pod_template_have_equal_hashes() -> None:
    patched = Options(pod_template={"spec": {"priorityClassName": "training"}})
    assert hash(patched) == hash(Options(pod_template={"spec": {"priorityClassName": "training"}}))
    assert patched != Options()
