"""The agent of one node: torchrun, which dies with the node's task. ``python -m launchers.agent ARGS``."""

from __future__ import annotations

import os

from launchers.processes import PARENT
from launchers.rank import die_with_parent


def main() -> None:
    die_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
