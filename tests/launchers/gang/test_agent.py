"""Lines of the torchrun agent log that are filtered."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys

import pytest

from launchers.gang import agent


def test_only_the_exit_barrier_error_of_torchrun_is_filtered_from_the_log() -> None:
    """If torch changes the message, the filter would let its traceback through."""
    for message, relevant in (
        ("Error waiting on exit barrier. Elapsed: %s seconds", False),
        ("Local worker group failed after %s seconds", True),
    ):
        record = logging.LogRecord("agent", logging.ERROR, __file__, 1, message, (0.1,), None)
        assert agent.is_relevant(record) == relevant
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    assert agent._EXIT_BARRIER_ERROR in inspect.getsource(api.SimpleElasticAgent._exit_barrier)
    assert api.logger.name == agent._AGENT_LOGGER


def test_the_agent_imports_no_settings() -> None:
    """They would add a third of a second to the start of each node."""
    code = "import sys, launchers.gang.agent; print({'pydantic', 'launchers.settings'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
