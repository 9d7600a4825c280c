"""The agent says what matters of a run, and nothing of how torchrun's agents part."""

from __future__ import annotations

import inspect
import logging

import pytest

from launchers.gang import agent


@pytest.mark.parametrize(
    ("message", "worth"),
    [
        ("Error waiting on exit barrier. Elapsed: %s seconds", False),
        ("Local worker group failed after %s seconds", True),
    ],
)
def test_agents_part_without_a_traceback(message: str, worth: bool) -> None:
    record = logging.LogRecord("agent", logging.ERROR, __file__, 1, message, (0.1,), None)
    assert agent.is_relevant(record) == worth


def test_torch_still_says_it_in_these_words() -> None:
    """A filter that knows other words than torch's would let the traceback through."""
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    assert agent._EXIT_BARRIER_ERROR in inspect.getsource(api.SimpleElasticAgent._exit_barrier)
    assert api.logger.name == agent._AGENT_LOGGER
