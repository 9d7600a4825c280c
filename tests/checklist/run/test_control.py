"""Messages between node agents."""

from __future__ import annotations

import math

from checklist.run.control import Reply, WorkerReply


def test_nan_measurements_survive_the_channel() -> None:
    reply = Reply.model_validate_json(
        '{"kind": "done", "id": 1, "reply": {"value": NaN, "samples": [-Infinity]}}'
    )
    received = WorkerReply.model_validate_json(WorkerReply(rank=0, reply=reply).model_dump_json())
    assert math.isnan(received.reply.reply["value"])
    assert received.reply.reply["samples"] == [-math.inf]
