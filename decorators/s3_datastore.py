"""Storage in Metaflow's S3 datastore for files of any size, with a limited wait while S3 is unavailable.

If S3 does not respond, responds with 5xx or rejects expired credentials, requests are retried for
FINETUNE_DATASTORE_TIMEOUT minutes (docs/disruptions.md). After that the error is raised as UserError, and
this process does not wait again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlparse

from decorators import _metaflow
from estimator.aws_errors import failure_of
from estimator.errors import UserError
from estimator.formatting import format_duration

FIRST_S = 30.0  # limit for a datastore that has never responded: its address may be wrong
PAUSE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientError:
    """Error of an S3 request that may succeed later."""

    expired: bool  # whether the credentials have expired
    name: str  # name of the error

    @property
    def text(self) -> str:
        problem = "rejects the expired AWS credentials" if self.expired else "does not respond"
        return f"{problem} ({self.name})"

    def error(self, where: str, waited_s: float) -> UserError:
        """Return the error to raise at the end of the wait."""
        if self.expired:
            return UserError(
                f"{where}: the AWS credentials have expired.",
                "Log in again (aws sso login), or use a role whose credentials are renewed; then resume.",
            )
        waited = f" for {format_duration(waited_s)}" if waited_s >= PAUSE_S else ""
        return UserError(
            f"The datastore {where} has not responded{waited} ({self.name}).",
            "Check METAFLOW_S3_ENDPOINT_URL, the network and S3; then resume.",
        )


def transient_error_of(error: BaseException) -> TransientError | None:
    """Return the error if a retry may help; None for a final error."""
    failure = failure_of(error)
    if failure.kind not in ("expired", "busy", "unreachable"):
        return None
    return TransientError(expired=failure.kind == "expired", name=failure.code)


@dataclass(kw_only=True)
class OutageWait:
    """Retries requests to an unavailable datastore, with one time limit per process."""

    max_outage_s: float
    has_responded: bool = False
    print_final_error: bool = True
    """Whether to print the final error: a task that cannot store its results shows only Metaflow's error."""
    report: Callable[[str], None] = _metaflow.print_line
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _finished: bool = False

    def call(
        self,
        where: str,
        operation: Callable[[], T],
        renew: Callable[[], None] = lambda: None,
        since: float | None = None,
    ) -> T:
        """Return the result of ``operation``, retried; ``renew`` reloads the credentials. Raises UserError.

        ``since``: time of the datastore's last response, by ``clock``; None: now. Even if it was long ago,
        requests are retried for a few seconds.
        """
        start, last_reported = self.clock(), ""
        if since is not None:
            start = max(since, start - self.max_outage_s + min(FIRST_S, self.max_outage_s / 2))
        while True:
            try:
                response = operation()
            except Exception as error:
                transient = transient_error_of(error)
                self.has_responded = self.has_responded or transient is None
                if transient is None:
                    raise
                waited = self.clock() - start
                limit = self._limit(transient)
                if waited >= limit:
                    raise self._end(transient.error(where, waited)) from None
            else:
                self.has_responded = True
                return response
            if transient.text != last_reported:
                last_reported = transient.text
                self.report(f"The datastore {where} {last_reported}; retrying for {format_duration(limit)}.")
            self.sleep(min(PAUSE_S, limit - waited))
            if transient.expired:
                renew()

    def stop(self) -> None:
        """Neither retry nor report from now on."""
        self._finished = True

    def _end(self, error: UserError) -> UserError:
        if self.print_final_error and self.has_responded and not self._finished:
            self.report(error.problem)
            self.report(error.advice)
            _metaflow.give_up_datastore()
        self._finished = True
        return error

    def _limit(self, transient: TransientError) -> float:
        if self._finished:
            return 0.0
        if self.has_responded:
            return self.max_outage_s
        return 0.0 if transient.expired else min(FIRST_S, self.max_outage_s)


_outage_wait: OutageWait | None = None


def outage_wait() -> OutageWait:
    """Return the wait that all storages of this process share.

    Raises UserError if FINETUNE_DATASTORE_TIMEOUT is not a number of minutes.
    """
    global _outage_wait
    _outage_wait = _outage_wait or OutageWait(max_outage_s=_metaflow.datastore_timeout_s())
    return _outage_wait


def stop_waiting() -> None:
    """Make this process's further requests to S3 fail at their first error, without a message."""
    outage_wait().stop()


class S3Storage:
    """Storage through boto3, with Metaflow's client, credentials and endpoint."""

    def __init__(self, root: str, waits: OutageWait | None = None) -> None:
        self._deletion_denied = False
        address = urlparse(root)
        self._bucket, self._prefix = address.netloc, address.path.strip("/")
        self._root = root
        self._outage_wait = waits or outage_wait()
        self._renew()

    def _renew(self) -> None:
        self._client, self._error = _metaflow.s3_client()

    def _call(self, operation: Callable[[], T]) -> T:
        def explained() -> T:
            try:
                return operation()
            except self._error as error:
                if failure_of(error).code == "400":  # response to HEAD, which has no body with the reason
                    self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
                raise

        return self._outage_wait.call(self._root, explained, self._renew)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def put_file(self, key: str, path: Path) -> None:
        self._call(lambda: self._client.upload_file(str(path), self._bucket, self._key(key)))

    def get_file(self, key: str, path: Path) -> None:
        try:
            self._call(lambda: self._client.download_file(self._bucket, self._key(key), str(path)))
        except self._error as error:
            self._raise_if_missing(error, key)
            raise

    def put_bytes(self, key: str, data: bytes) -> None:
        self._call(lambda: self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data))

    def get_bytes(self, key: str) -> bytes:
        def read() -> bytes:
            response = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            return bytes(response["Body"].read())

        try:
            return self._call(read)
        except self._error as error:
            self._raise_if_missing(error, key)
            raise

    def size(self, key: str) -> int | None:
        def read_size() -> int:
            return int(self._client.head_object(Bucket=self._bucket, Key=self._key(key))["ContentLength"])

        try:
            return self._call(read_size)
        except self._error as error:
            if failure_of(error).is_missing:
                return None
            raise

    def keys(self, prefix: str) -> list[str]:
        def listed() -> list[str]:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(prefix).rstrip("/") + "/"
            )
            return [item["Key"] for page in pages for item in page.get("Contents", ())]

        start = len(self._key(""))
        return sorted(key[start:] for key in self._call(listed))

    def delete(self, keys: Iterable[str]) -> bool:
        names = [{"Key": self._key(key)} for key in keys]
        refused: list[dict[str, str]] = []  # S3 responds with 200 and a list of failed keys
        for first in range(0, len(names), 1000):  # S3's limit for one request
            objects = {"Objects": names[first : first + 1000], "Quiet": True}
            response = self._call(
                lambda objects=objects: self._client.delete_objects(Bucket=self._bucket, Delete=objects)  # type: ignore[misc]
            )
            refused += response.get("Errors", ())
        if refused and not self._deletion_denied:
            self._deletion_denied = True
            _metaflow.print_line(
                f"S3 denied deleting s3://{self._bucket}/{refused[0].get('Key')} ({refused[0].get('Code')}): "
                "old checkpoints are kept. The tasks' role needs s3:DeleteObject."
            )
        return not refused

    def describe(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._key(key)}"

    def _raise_if_missing(self, error: Exception, key: str) -> None:
        if failure_of(error).is_missing:
            raise FileNotFoundError(self.describe(key)) from None
