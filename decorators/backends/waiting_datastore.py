"""While a step runs in its containers: whether the run's datastore still answers the process that waits.

Logs, results and checkpoints go through it, so a run whose datastore stays away can't end well, and each of
its processes would find that out by itself, one after the other. Here it ends at once, with its containers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlparse

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.s3_datastore import Patience, trouble_of
from estimator.errors import UserError

ASK_EVERY_S = 15.0


@dataclass(kw_only=True)
class DatastoreWatch:
    """Called with the job as often as one likes.

    Parameters
    ----------
    root:
        s3://bucket/..., for people.
    ask:
        One brief question to the datastore, which raises what the answer was.
    remove:
        Removes the job.
    """

    root: str
    ask: Callable[[], None]
    remove: Callable[[WaitedJob], None]
    patience: Patience
    clock: Callable[[], float] = time.monotonic
    _answered_at: float | None = None
    _over: bool = False

    def __call__(self, job: WaitedJob) -> None:
        """Raises UserError when the datastore has been away for too long; the job is removed by then."""
        now, last = self.clock(), self._answered_at
        if self._over or (last is not None and now - last < ASK_EVERY_S):
            return
        try:
            # Metaflow may have asked in vain for the step's log since then
            self.patience.ask(self.root, self.ask, since=last)
        except UserError as error:
            self._over = True
            self.remove(job)
            raise UserError(f"{error.problem.rstrip('.')}; {job.what} is ended.", error.advice) from None
        self._answered_at = self.clock()


def watch(remove: Callable[[WaitedJob], None]) -> DatastoreWatch | None:
    """For this process's run; None where its datastore is not S3."""
    storage = _metaflow.storage()
    if storage.TYPE != "s3":
        return None
    root = str(storage.datastore_root)
    return DatastoreWatch(
        root=root,
        ask=lambda: ask_briefly(root),
        remove=remove,
        # It has answered when the code package was stored
        patience=Patience(away_s=_metaflow.datastore_away_s(), answered=True, last_words=False),
    )


def ask_briefly(root: str) -> None:
    """Ask for one key, with the credentials as they are now; what S3 refuses for good is an answer, too."""
    address = urlparse(root)
    client, error_class = _metaflow.s3_client(impatient=True)
    try:
        client.list_objects_v2(Bucket=address.netloc, Prefix=address.path.strip("/"), MaxKeys=1)
    except error_class as error:
        if trouble_of(error) is not None:
            raise
