"""Messages for jobs that a cluster refuses or aborts."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException

from decorators._metaflow.commands import command_words
from decorators._metaflow.endings import say
from decorators._metaflow.jobs import WaitedJob, batch_job, kubernetes_job
from decorators._metaflow.patience import hurry
from estimator.errors import UserError


def put_batch_in_words(
    words: Callable[[Exception, str], UserError], ended: Callable[[WaitedJob], None]
) -> None:
    """End with two lines where submitting a step to AWS Batch, or waiting for it, meets an exception.

    ``words`` makes them from the exception and the id of a job that is left there; empty: none is.

    ``ended`` hears of a step that has failed.
    """
    from metaflow.plugins.aws.batch.batch import Batch

    if (command_words() or [""])[0] != "batch" or hasattr(Batch.wait, "__wrapped__"):
        return
    Batch.launch_job = _batch_in_words(Batch.launch_job, words, ended)
    Batch.wait = _batch_in_words(Batch.wait, words, ended)


def _batch_in_words(
    own: Callable[..., None],
    words: Callable[[Exception, str], UserError],
    ended: Callable[[WaitedJob], None],
) -> Callable[..., None]:
    @functools.wraps(own)
    def clean(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            own(self, *args, **kwargs)
        except Exception as error:
            # Taken from Metaflow, whose own end would ask for it once more and print another traceback
            job = self.__dict__.pop("job", None)
            if isinstance(error, MetaflowException) and job is not None:
                ended(batch_job(job))
                raise  # a step that has failed: Metaflow says how in a line
            refusal = words(error, job.id if job is not None and not _terminated(job) else "")
            say(refusal.problem)
            say(refusal.advice)
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None

    return clean


def _terminated(job: Any) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        job._client.terminate_job(jobId=job.id, reason="the process that waited for it has ended")
    except (BotoCoreError, ClientError):
        return False
    return True


def put_in_words(
    words: Callable[[Exception, str], UserError], endings: Callable[[WaitedJob], list[str]]
) -> None:
    """End with two lines where submitting a step to Kubernetes, or waiting for it, meets an exception.

    Metaflow would print a traceback. ``words`` makes them from the exception and what it was about: the name
    and namespace of what was submitted, empty where nothing was. Of a step that has failed, Metaflow tells
    little more than that; ``endings`` has a line for each of its pods.
    """
    from metaflow.plugins.kubernetes.kubernetes import Kubernetes

    if (command_words() or [""])[0] != "kubernetes" or hasattr(Kubernetes.wait, "__wrapped__"):
        return
    Kubernetes.launch_job = _in_words(Kubernetes.launch_job, words, endings)
    Kubernetes.wait = _in_words(Kubernetes.wait, words, endings)


def _in_words(
    own: Callable[..., None],
    words: Callable[[Exception, str], UserError],
    endings: Callable[[WaitedJob], list[str]],
) -> Callable[..., None]:
    @functools.wraps(own)
    def clean(self: Any, *args: Any, **kwargs: Any) -> None:
        job = None
        try:
            own(self, *args, **kwargs)
            atexit.register(hurry)  # called before Metaflow's own, which asks for the job's state once more
        except Exception as error:
            job = getattr(self, "_job", None)
            if isinstance(error, MetaflowException) and job is not None:
                for line in endings(kubernetes_job(job)):
                    say(line)
                raise
            name = f"{kubernetes_job(job).what} in namespace {job._namespace}" if job is not None else ""
            hurry()
            refusal = words(error, name)
            say(refusal.problem)
            say(refusal.advice)
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None

    return clean
