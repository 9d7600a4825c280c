"""What supervisors say to each other."""

from __future__ import annotations

import math

from checklist.run.control import Reply, WorkerReply


def test_nan_measurements_survive_the_channel() -> None:
    said = Reply.model_validate_json(
        '{"kind": "done", "id": 1, "reply": {"value": NaN, "samples": [-Infinity]}}'
    )
    heard = WorkerReply.model_validate_json(WorkerReply(rank=0, reply=said).model_dump_json())
    assert math.isnan(heard.reply.reply["value"])
    assert heard.reply.reply["samples"] == [-math.inf]
