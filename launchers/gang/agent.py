"""The agent of one node: torchrun, which dies with the node's task: ``python -m launchers.gang.agent``."""

from __future__ import annotations

import os
import signal

from launchers.cluster.processes import PARENT, die_with_parent
from launchers.imports import collector_paused


def main() -> None:
    die_with_parent(int(os.environ[PARENT]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler sends it to all; the node's task acts on it
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    with collector_paused():
        from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
