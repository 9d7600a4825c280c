"""Agent of one node: torchrun, which dies with the node's task: ``python -m launchers.gang.agent``."""

from __future__ import annotations

import logging
import os
import signal
import sys

from launchers.base.imports import collector_paused
from launchers.cluster.processes import PARENT, die_with_parent

IGNORED_VARIABLE = "FINETUNE_IGNORED_SIGNALS"  # comma-separated names
_AGENT_LOGGER = "torch.distributed.elastic.agent.server.api"
_BY_TORCHRUN = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_EXIT_BARRIER_ERROR = "Error waiting on exit barrier"


def is_relevant(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's agent log is relevant to the run.

    When the ranks of all nodes are done, the agents wait for each other in the first agent's store. The first
    may see the last one arrive and end before it has answered all, which the others log with a traceback.
    """
    return not record.getMessage().startswith(_EXIT_BARRIER_ERROR)


def ignore_signals(names: str) -> list[str]:
    """Ignore signals, named with commas between, here and in the ranks, which inherit that.

    Returns torchrun's arguments: it would handle SIGTERM itself, and end its ranks.
    """
    ignored = [name for name in names.split(",") if name]
    for name in ignored:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    return [f"--signals-to-handle={','.join(name for name in _BY_TORCHRUN if name not in ignored)}"]


def main() -> None:
    """Entry point of the agent process."""
    die_with_parent(int(os.environ[PARENT]))
    arguments = ignore_signals(os.environ.get(IGNORED_VARIABLE, ""))
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    with collector_paused():
        from torch.distributed.run import main as torchrun

    logging.getLogger(_AGENT_LOGGER).addFilter(is_relevant)
    torchrun([*arguments, *sys.argv[1:]])


if __name__ == "__main__":
    main()
