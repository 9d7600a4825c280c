"""Watch of the run's datastore in the process that waits for a remote step.

Logs, results and checkpoints go through the datastore, so a run fails if it stays unavailable. Instead of
each process failing separately after its own timeout, the step ends at once, together with its containers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlparse

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.s3_datastore import OutageWait, transient_error_of
from estimator.errors import UserError

PROBE_EVERY_S = 15.0


@dataclass(kw_only=True)
class DatastoreWatch:
    """Watch of the datastore; may be called at any rate.

    Parameters
    ----------
    root:
        Address for messages, such as s3://bucket/...
    probe:
    Makes one short request to the datastore; raises its error.
    remove:
        Removes the job.
    """

    root: str
    probe: Callable[[], None]
    remove: Callable[[WaitedJob], None]
    outage_wait: OutageWait
    clock: Callable[[], float] = time.monotonic
    _answered_at: float | None = None
    _over: bool = False

    def __call__(self, job: WaitedJob) -> None:
        """Probe the datastore; after a long outage remove the job and raise UserError."""
        now, answered_at = self.clock(), self._answered_at
        if self._over or (answered_at is not None and now - answered_at < PROBE_EVERY_S):
            return
        try:
            # Metaflow's reads of the step's log may have failed since then
            self.outage_wait.call(self.root, self.probe, since=answered_at)
        except UserError as error:
            self._over = True
            self.remove(job)
            raise UserError(f"{error.problem.rstrip('.')}; {job.what} was removed.", error.advice) from None
        self._answered_at = self.clock()


def watch(remove: Callable[[WaitedJob], None]) -> DatastoreWatch | None:
    """Return the watch of this process's run; None if its datastore is not S3."""
    storage = _metaflow.storage()
    if storage.TYPE != "s3":
        return None
    root = str(storage.datastore_root)
    return DatastoreWatch(
        root=root,
        probe=lambda: probe_once(root),
        remove=remove,
        # It was available when the code package was stored
        outage_wait=OutageWait(
            max_outage_s=_metaflow.datastore_timeout_s(), has_responded=True, print_final_error=False
        ),
    )


def probe_once(root: str) -> None:
    """Request one key with the current credentials. Raises transient errors; any other means available."""
    address = urlparse(root)
    client, error_class = _metaflow.s3_client(brief=True)
    try:
        client.list_objects_v2(Bucket=address.netloc, Prefix=address.path.strip("/"), MaxKeys=1)
    except error_class as error:
        if transient_error_of(error) is not None:
            raise
