"""The task of a node as a process: ``python -m tests.launchers.gang.node ORDER.json``."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.gang.control import Timeouts
from launchers.gang.departure import NO_GRACE, Grace
from launchers.gang.failures import GangFailed
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.report.telemetry import StepTiming
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore


def main() -> None:
    path = Path(sys.argv[1])
    order = json.loads(path.read_text())
    values = order["address"]
    address = NodeAddress(**{**values, "ports": tuple(values["ports"]), "secret": Secret(values["secret"])})
    store = order.get("store") and CheckpointStore(LocalStorage(Path(order["store"])), "run/train")
    events = path.with_suffix(".events").open("a", buffering=1)
    end: dict[str, object] = {}
    grace_s = order["grace_s"]
    try:
        run_node(
            TrainJob.load(Path(order["job"])),
            address,
            on_event=lambda event: print(
                getattr(event, "name", event.kind),
                event.rank,
                getattr(event, "step", 0),
                *([event.node, event.in_collectives] if isinstance(event, StepTiming) else []),
                file=events,
            ),
            checkpoints=store or None,
            engine=order["engine"],
            timeouts=Timeouts(**order["timeouts"]),
            grace=Grace(seconds=grace_s, signals=(signal.SIGTERM,)) if grace_s else NO_GRACE,
        )
    except BaseException as error:
        end = {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, GangFailed):
            end["failure"] = error.failure.to_dict()
        raise
    finally:
        path.with_suffix(".end").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
