"""Storage in Metaflow's S3 datastore for files of any size; waits for a limited time while S3 is unavailable.

S3 that doesn't answer, answers 5xx or takes the credentials for expired is asked on for the minutes of
FINETUNE_DATASTORE_TIMEOUT (docs/disruptions.md). What is still so then is a UserError, and this process never
waits again.
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

FIRST_S = 30.0  # for a datastore that has never answered: its address may be wrong
PAUSE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Reason of a failed S3 request that may succeed later."""

    expired: bool  # the credentials
    name: str  # of the error

    @property
    def text(self) -> str:
        did = "takes the AWS credentials for expired" if self.expired else "doesn't answer"
        return f"{did} ({self.name})"

    def error(self, where: str, waited_s: float) -> UserError:
        """Return the error to raise when waiting ends."""
        if self.expired:
            return UserError(
                f"{where}: the AWS credentials have expired.",
                "Log in again: aws sso login, or give the tasks a role that is renewed; then: resume.",
            )
        waited = f" for {format_duration(waited_s)}" if waited_s >= PAUSE_S else ""
        return UserError(
            f"The datastore {where} has not answered{waited} ({self.name}).",
            "Look at METAFLOW_S3_ENDPOINT_URL, the network and S3 itself; then: resume.",
        )


def trouble_of(error: BaseException) -> Trouble | None:
    """Return the reason if a retry may help; None for a final answer of S3."""
    failure = failure_of(error)
    if failure.kind not in ("expired", "busy", "unreachable"):
        return None
    return Trouble(expired=failure.kind == "expired", name=failure.code)


@dataclass(kw_only=True)
class Patience:
    """Limit of the time that one process waits for an unavailable datastore; after that it no longer
    waits.
    """

    away_s: float
    answered: bool = False
    last_words: bool = True
    """Whether to say the end, too: a task that can't store its results shows that error instead of ours."""
    say: Callable[[str], None] = _metaflow.say
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _over: bool = False

    def ask(
        self,
        where: str,
        operation: Callable[[], T],
        renew: Callable[[], None] = lambda: None,
        since: float | None = None,
    ) -> T:
        """Return the result of ``operation``, retried; ``renew`` reads the credentials again. Raises
        UserError.

        ``since``: when the datastore last answered, by the clock; None: it may have done so just now. However
        long ago that is, it is asked for some seconds more.
        """
        began, last_trouble = self.clock(), ""
        if since is not None:
            began = max(since, began - self.away_s + min(FIRST_S, self.away_s / 2))
        while True:
            try:
                answer = operation()
            except Exception as error:
                trouble = trouble_of(error)
                self.answered = self.answered or trouble is None
                if trouble is None:
                    raise
                waited = self.clock() - began
                limit = self._limit(trouble)
                if waited >= limit:
                    raise self._end(trouble.error(where, waited)) from None
            else:
                self.answered = True
                return answer
            if trouble.text != last_trouble:
                last_trouble = trouble.text
                self.say(f"The datastore {where} {last_trouble}; asking on for {format_duration(limit)}.")
            self.sleep(min(PAUSE_S, limit - waited))
            if trouble.expired:
                renew()

    def _end(self, error: UserError) -> UserError:
        if self.last_words and self.answered and not self._over:
            self.say(error.problem)
            self.say(error.advice)
            _metaflow.give_datastore_up()
        self._over = True
        return error

    def _limit(self, trouble: Trouble) -> float:
        if self._over:
            return 0.0
        if self.answered:
            return self.away_s
        return 0.0 if trouble.expired else min(FIRST_S, self.away_s)


_patience: Patience | None = None


def patience() -> Patience:
    """Return the limit that all storages of this process share.

    Raises UserError where FINETUNE_DATASTORE_TIMEOUT is no number of minutes.
    """
    global _patience
    _patience = _patience or Patience(away_s=_metaflow.datastore_away_s())
    return _patience


class S3Storage:
    """Storage through boto3, with Metaflow's client, credentials and endpoint."""

    def __init__(self, root: str, waits: Patience | None = None) -> None:
        self._said = False
        address = urlparse(root)
        self._bucket, self._prefix = address.netloc, address.path.strip("/")
        self._root = root
        self._patience = waits or patience()
        self._renew()

    def _renew(self) -> None:
        self._client, self._error = _metaflow.s3_client()

    def _ask(self, operation: Callable[[], T]) -> T:
        def explained() -> T:
            try:
                return operation()
            except self._error as error:
                if failure_of(error).code == "400":  # of a HEAD, whose answer has no body to say why
                    self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
                raise

        return self._patience.ask(self._root, explained, self._renew)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def put_file(self, key: str, path: Path) -> None:
        self._ask(lambda: self._client.upload_file(str(path), self._bucket, self._key(key)))

    def get_file(self, key: str, path: Path) -> None:
        try:
            self._ask(lambda: self._client.download_file(self._bucket, self._key(key), str(path)))
        except self._error as error:
            self._missing(error, key)
            raise

    def put_bytes(self, key: str, data: bytes) -> None:
        self._ask(lambda: self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data))

    def get_bytes(self, key: str) -> bytes:
        def read() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            return bytes(answer["Body"].read())

        try:
            return self._ask(read)
        except self._error as error:
            self._missing(error, key)
            raise

    def size(self, key: str) -> int | None:
        def look() -> int:
            return int(self._client.head_object(Bucket=self._bucket, Key=self._key(key))["ContentLength"])

        try:
            return self._ask(look)
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
        return sorted(key[start:] for key in self._ask(listed))

    def delete(self, keys: Iterable[str]) -> bool:
        names = [{"Key": self._key(key)} for key in keys]
        refused: list[dict[str, str]] = []  # S3 answers that all is well, with a list of what is not
        for first in range(0, len(names), 1000):  # S3's limit for one request
            some = {"Objects": names[first : first + 1000], "Quiet": True}
            answer = self._ask(
                lambda some=some: self._client.delete_objects(Bucket=self._bucket, Delete=some)  # type: ignore[misc]
            )
            refused += answer.get("Errors", ())
        if refused and not self._said:
            self._said = True
            _metaflow.say(
                f"S3 does not remove s3://{self._bucket}/{refused[0].get('Key')} ({refused[0].get('Code')}): "
                "old checkpoints stay. The tasks' role needs s3:DeleteObject."
            )
        return not refused

    def describe(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._key(key)}"

    def _missing(self, error: Exception, key: str) -> None:
        if failure_of(error).is_missing:
            raise FileNotFoundError(self.describe(key)) from None
