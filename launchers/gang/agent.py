"""Agent of one node: torchrun, which dies with the node's task: ``python -m launchers.gang.agent``."""

from __future__ import annotations

import logging
import os
import signal

from launchers.cluster.processes import PARENT, die_with_parent
from launchers.imports import collector_paused

_AGENT_LOGGER = "torch.distributed.elastic.agent.server.api"
_EXIT_BARRIER_ERROR = "Error waiting on exit barrier"


def is_relevant(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's agent log is relevant to the run.

    When the ranks of all nodes are done, the agents wait for each other in the first agent's store. The first
    may see the last one arrive and end before it has answered all, which the others log with a traceback.
    """
    return not record.getMessage().startswith(_EXIT_BARRIER_ERROR)


def main() -> None:
    """Entry point of the agent process."""
    die_with_parent(int(os.environ[PARENT]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # sent to all processes; the node's task handles it
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    with collector_paused():
        from torch.distributed.run import main as torchrun

    logging.getLogger(_AGENT_LOGGER).addFilter(is_relevant)
    torchrun()


if __name__ == "__main__":
    main()
