"""Everything that this project needs of Metaflow's internals, in one place.

Read from and tried with Metaflow 2.19.39; a newer Metaflow needs this module's tests to pass first.
What is used, and why no public interface serves:

* ``metaflow.system_context.system_context.phase`` and the click context's ``saved_args``: which command
  this process runs. A mutator runs in all of them, and must plan in some and stay silent in the others.
* ``metaflow._vendor.click.get_current_context``: the parsed flow parameters. A mutator is given the
  parameters' declarations, not the values of this run.
* ``TaskDataStoreSet``/``FlowDataStore``/``get_latest_run_id``: the parameters of the run that ``resume``
  starts from; its own command has none.
* ``parameters.deploy_time_eval``: the defaults that a deployed flow will run with.
* ``MutableStep._my_step`` with ``.decorators``, ``.config_decorators``, and a decorator's ``attributes``,
  ``_user_defined_attributes``, ``statically_defined``: what the user gave explicitly, as against defaults;
  and editing in place. ``add_decorator(..., OVERRIDE)`` would mark a decorator as inserted, and Metaflow
  would then not hand a ``--with kubernetes:...`` on to the processes of the step.
* ``CardComponentManager._card_proc`` and ``CardProcessManager``: the last state of a failed step must reach
  its card before the task ends (Metaflow finishes the card of a successful step only), and waiting for a
  page must not cost a core.
* ``KubernetesJob.create_job_spec``, ``JobSetSpec.dump``, ``ArgoWorkflows._container_templates``: a pod's
  priority class and the name of its node, neither of which ``@kubernetes`` has an argument for.
* ``is_done`` of Kubernetes' ``RunningJob`` and ``RunningJobSet`` and of Batch's ``RunningJob``: Metaflow asks
  for it every few seconds while it waits for a step, and shows neither why a job does not start nor ends it.
  ``_fetch_job``, ``_fetch_pod``, ``_fetch_jobset``: an API server that is gone for a while must not end it.
* ``Kubernetes.launch_job``, ``Kubernetes.wait``: what the API server refuses is shown as a traceback.
* ``CatchDecorator`` under another name: Kubernetes refuses ``@catch`` beside ``@parallel``, by its name.
* A compute decorator's ``runtime_step_cli``: an attempt after one that ran out of memory may need another
  machine, and Metaflow asks no one before it starts a retry.
* ``unbounded_foreach.UBF_TASK``: how the command line of another node of a local run is known.
* ``METAFLOW_EXIT_DISALLOW_RETRY``, ``system_context.retry_count``: a user's mistake is not worth a retry. The
  scheduler then ends with a line about the terminal step, so it is used only where a retry would follow, and
  ``MetaflowInternalError.headline`` is put into words that fit.
* ``metaflow_config``: the namespace and the queue that steps run in where the user names none.
* ``FlowDataStore._storage_impl``, ``plugins.DATASTORES``, ``datatools.s3.s3util.get_s3_client``: the run's
  datastore for files of any size. The public ``S3`` has no way to remove anything, and knows S3 only.
* ``metaflow_config``'s settings of S3, and their copies in ``datatools.s3``: for hours Metaflow asks again
  what S3 doesn't answer. Its variables do in other processes; this one has read them before it can set them.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from metaflow._vendor import click
from metaflow.datastore import FlowDataStore, TaskDataStoreSet
from metaflow.decorators import _base_step_decorator
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException, MetaflowInternalError
from metaflow.parameters import DelayedEvaluationParameter, deploy_time_eval
from metaflow.plugins.cards.card_creator import CardProcessManager
from metaflow.plugins.catch_decorator import CatchDecorator
from metaflow.system_context import ExecutionPhase, system_context
from metaflow.unbounded_foreach import UBF_TASK
from metaflow.util import get_latest_run_id, get_username

from estimator.errors import UserError

Backend = Literal["local", "kubernetes", "batch"]
Command = Literal["run", "resume", "deploy", "task", "trampoline", "other"]
CARD_ID = "finetune"

_DEPLOYERS: dict[str, Backend] = {
    "argo-workflows": "kubernetes",
    "airflow": "kubernetes",
    "step-functions": "batch",
}
_GIVEN = "_finetune_given"


class FinetuneError(MetaflowException):  # type: ignore[misc]
    """A user's mistake as Metaflow shows it: a headline and lines of text, no traceback, exit status 1."""

    headline = "Can't go on"

    def __init__(self, problem: str, advice: str = "") -> None:
        # Metaflow takes asterisks for emphasis and drops them.
        text = f"{problem}\n{advice}" if advice else problem
        super().__init__(text.replace("*", "\N{ASTERISK OPERATOR}"))
        self.problem = problem
        self.advice = advice

    def __reduce__(self) -> tuple[type[FinetuneError], tuple[str, str]]:
        return type(self), (self.problem, self.advice)


class TrainingFailed(FinetuneError):  # noqa: N818 - it says what has happened
    """A gang's failure: its text holds the failing rank's own traceback, and Metaflow's adds nothing."""

    headline = "Training failed"


class NotFit(FinetuneError):  # noqa: N818 - it says what was found
    """The checklist's verdict, where it is one that training should not begin with."""

    headline = "The checklist says"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a UserError into its clean lines; for steps without ``@gpu_profile``, which does it itself."""
    try:
        yield
    except UserError as error:
        raise final(error) from None


_ended_by_user_error = False


def final(error: UserError, kind: type[FinetuneError] = FinetuneError) -> FinetuneError:
    """A UserError as Metaflow shows it, that ends the task for good: a retry would meet it again."""
    global _ended_by_user_error
    _ended_by_user_error = True
    return kind(error.problem, error.advice)


def main(flow: type[Any]) -> None:
    """Run a flow's command line, as ``flow()`` does.

    Gives Metaflow a user's name where the machine has none, and ends a task that met a UserError with the
    exit status that tells Metaflow's local scheduler not to retry it (Metaflow itself always ends with 1).
    """
    ensure_user()
    MetaflowInternalError.headline = "The run has failed"
    try:
        limit_datastore()
    except UserError as error:
        say(error.problem)
        say(error.advice)
        raise SystemExit(1) from None
    try:
        flow()
    except SystemExit as ended:
        if ended.code == 1 and _ended_by_user_error and _would_be_retried():
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None
        raise


def _would_be_retried() -> bool:
    # Asked after Metaflow's command has ended, when no click context is left.
    task = system_context.phase == ExecutionPhase.TASK
    return task and (system_context.retry_count or 0) < (system_context.max_user_code_retries or 0)


def command() -> Command:
    """What this process was started for."""
    words = _words()
    if not words:
        return "other"
    if system_context.phase == ExecutionPhase.TASK:
        return "task"
    if system_context.phase == ExecutionPhase.TRAMPOLINE:
        return "trampoline"
    if words[0] == "run":
        return "run"
    if words[0] == "resume":
        return "resume"
    if words[0] in _DEPLOYERS and "create" in words:
        return "deploy"
    return "other"


def _words() -> list[str]:
    context = click.get_current_context(silent=True)
    return list(getattr(context.find_root(), "saved_args", None) or []) if context else []


def deployer() -> str | None:
    """The scheduler that the flow is being deployed to, as Metaflow's command calls it; None: it is not."""
    return _words()[0] if command() == "deploy" else None


def compiles_only() -> bool:
    """Whether a deployment is only written out, for somebody else's cluster perhaps."""
    return "--only-json" in _words()


def in_container() -> bool:
    """Whether this task runs in a Kubernetes pod or a Batch job rather than beside its scheduler."""
    return "METAFLOW_KUBERNETES_WORKLOAD" in os.environ or "AWS_BATCH_JOB_ID" in os.environ


def configured_target(backend: Backend) -> dict[str, Any]:
    """Where steps run by Metaflow's configuration, in the words of ``@kubernetes`` and ``@batch``."""
    from metaflow.metaflow_config import BATCH_JOB_QUEUE, KUBERNETES_NAMESPACE

    return {"kubernetes": {"namespace": KUBERNETES_NAMESPACE}, "batch": {"queue": BATCH_JOB_QUEUE}}.get(
        backend, {}
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """A value that the user wrote down, and where."""

    value: Any
    by: str


class StepView:
    """A step as its mutator may see and change it."""

    def __init__(self, mutable_step: Any) -> None:
        self._mutable = mutable_step
        self._step = mutable_step._my_step

    @property
    def name(self) -> str:
        return str(self._step.name)

    def steps(self) -> list[StepView]:
        """All steps of the flow, this one among them."""
        return [StepView(step) for _, step in self._mutable.flow.steps]

    def mutators(self, kind: type[Any]) -> list[Any]:
        """The step's mutators of one class."""
        return [mutator for mutator in self._step.config_decorators if isinstance(mutator, kind)]

    def backend(self) -> Backend:
        """Where the step will run, ``--with`` and deployments included."""
        remote: tuple[Backend, ...] = ("kubernetes", "batch")
        for name in remote:
            if self._find(name) is not None:
                return name
        words = _words()
        return _DEPLOYERS.get(words[0], "local") if words else "local"

    def has(self, decorator: str) -> bool:
        return self._find(decorator) is not None

    def given(self, decorator: str) -> dict[str, Given]:
        """What the user wrote explicitly into a decorator, in the flow or after ``--with``."""
        found = self._find(decorator)
        if found is None or found.inserted_by:
            return {}
        by = f"@{decorator} in the flow" if found.statically_defined else f"--with {decorator}"
        return {
            name: Given(value=value, by=by if found.statically_defined else f"{by}:{name}=")
            for name, value in getattr(found, _GIVEN).items()
            if value is not None
        }

    def values(self, decorator: str) -> dict[str, Any]:
        """All values of a decorator, Metaflow's own configuration filled in; empty when it isn't there."""
        found = self._find(decorator)
        return dict(found.attributes) if found is not None else {}

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        """Lay values over a decorator, adding it first where the step hasn't got it."""
        found = self._find(decorator)
        if found is None:
            self._mutable.add_decorator(decorator, deco_kwargs=values)
        else:
            found.attributes.update(values)

    def add_environment(self, variables: dict[str, str]) -> None:
        """Environment variables for the step's container."""
        self.set_values(
            "environment", {"vars": {**(self.values("environment").get("vars") or {}), **variables}}
        )

    def add_card(self, refresh_seconds: float) -> None:
        """The step's live card; a step that already has one of the same id keeps it."""
        if not any(d.name == "card" and d.attributes.get("id") == CARD_ID for d in self._step.decorators):
            self._mutable.add_decorator(
                "card",
                deco_kwargs={"type": "blank", "id": CARD_ID, "refresh_interval": refresh_seconds},
            )

    def flow_values(self) -> dict[str, Any]:
        """Parameters (by name, dashes as underscores) and configs that the run will have."""
        values: dict[str, Any] = {name: _plain(value) for name, value in self._mutable.flow.configs}
        declared = dict(self._mutable.flow.parameters)
        kind = command()
        if kind == "run":
            parsed = _run_parameters()
        elif kind == "resume":
            parsed = self._origin_parameters(declared)
        else:
            parsed = {_key(p): deploy_time_eval(p.kwargs.get("default")) for p in declared.values()}
        for parameter in declared.values():
            values[_key(parameter)] = _plain(parsed.get(_key(parameter)))
        return values

    def _origin_parameters(self, declared: dict[str, Any]) -> dict[str, Any]:
        context = click.get_current_context()
        flow = system_context.flow
        run_id = context.params.get("origin_run_id") or get_latest_run_id(context.obj.echo, flow.name)
        if run_id is None:
            raise FinetuneError(
                "There is no run to resume: no earlier run of this flow is known here.",
                "Name one: resume --origin-run-id RUN",
            )
        found = list(
            TaskDataStoreSet(
                FlowDataStore(flow.name),
                run_id,
                steps=["_parameters"],
                prefetch_data_artifacts=list(declared),
            )
        )
        if not found:
            raise FinetuneError(
                f"Run {run_id} can't be resumed: its parameters are not in the datastore.",
                "Name another: resume --origin-run-id RUN",
            )
        return {_key(p): found[0][var] for var, p in declared.items() if var in found[0]}

    def _find(self, name: str) -> Any:
        for decorator in self._step.decorators:
            if decorator.name == name:
                decorator.external_init()  # evaluates config expressions; a second call does nothing
                if not hasattr(decorator, _GIVEN):
                    given = {k: decorator.attributes.get(k) for k in decorator._user_defined_attributes}
                    setattr(decorator, _GIVEN, given)
                return decorator
        return None


def _run_parameters() -> dict[str, Any]:
    context = click.get_current_context()
    while context is not None and context.info_name != "run":
        context = context.parent
    parsed = dict(context.params) if context else {}
    # A file's content is uploaded when its value is asked for; that is the run's business.
    return {k: v for k, v in parsed.items() if not isinstance(v, DelayedEvaluationParameter)}


def _key(parameter: Any) -> str:
    return str(parameter.name).replace("-", "_").lower()


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value


def shape_pods(priority_class: str | None) -> None:
    """From now on, give the pods that this process asks Kubernetes for what Metaflow has no argument for.

    That is a priority class, if one is named, and in their environment the name of their node, NODE_NAME.
    Holds for Jobs, JobSets and, where the flow is being deployed there, the templates of an Argo workflow.
    """
    from metaflow.plugins.kubernetes.kubernetes_job import KubernetesJob
    from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec

    global _pod_makers
    _pod_makers = _pod_makers or (KubernetesJob.create_job_spec, JobSetSpec.dump)
    own_job, own_jobset = _pod_makers

    def create_job_spec(self: Any) -> Any:
        from kubernetes import client

        spec = own_job(self)
        field = client.V1ObjectFieldSelector(field_path="spec.nodeName")
        source = client.V1EnvVarSource(field_ref=field)
        pod = spec.template.spec
        pod.containers[0].env.append(client.V1EnvVar(name="NODE_NAME", value_from=source))
        if priority_class:
            pod.priority_class_name = priority_class
        return spec

    def dump(self: Any) -> Any:
        made = own_jobset(self)
        pod = made["template"]["spec"]["template"]["spec"]
        pod["containers"][0]["env"].append({"name": "NODE_NAME", **_NODE_NAME})
        if priority_class:
            pod["priorityClassName"] = priority_class
        return made

    KubernetesJob.create_job_spec = create_job_spec
    JobSetSpec.dump = dump
    if deployer() == "argo-workflows":
        _shape_argo_pods(priority_class)


def _shape_argo_pods(priority_class: str | None) -> None:
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _argo_templates
    _argo_templates = _argo_templates or ArgoWorkflows._container_templates
    own = _argo_templates

    def container_templates(self: Any) -> Iterator[Any]:
        for template in own(self):
            container = template.payload.get("container")
            if container is not None:  # others are a JobSet's, which has them already
                container["env"].append({"name": "NODE_NAME", **_NODE_NAME})
                if priority_class:
                    template.payload["priorityClassName"] = priority_class
            yield template

    ArgoWorkflows._container_templates = container_templates


_NODE_NAME = {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
# Metaflow's own, once shape_pods has put others in their place
_pod_makers: tuple[Any, Any] | None = None
_argo_templates: Callable[[Any], Iterator[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class WaitedJob:
    """What this process waits for: a Kubernetes Job or JobSet, or an AWS Batch job."""

    backend: Literal["kubernetes", "batch"]
    kind: Literal["job", "jobset", "batch job"]
    name: str  # of a Batch job: its id
    namespace: str = ""
    client: Any = None  # Batch: boto3's
    info: Mapping[str, Any] = field(default_factory=dict)  # Batch: what describe_jobs has just said

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name}"

    def complain(self, text: str) -> None:
        say(text)


API_SERVER_GONE_S = 300.0  # how long an API server may be gone under a run, as while it is upgraded


def watch_waiting(seen: Callable[[WaitedJob], None]) -> None:
    """Call ``seen`` whenever Metaflow asks for the state of a remote job that this process waits for.

    A UserError of it ends this process with its two lines, and Metaflow does not try the step again.
    """
    command = (_words() or [""])[0]
    if command == "batch":
        from metaflow.plugins.aws.batch.batch_client import RunningJob as BatchJob

        _watch(BatchJob, seen, _batch_job)
    elif command == "kubernetes":
        from metaflow.plugins.kubernetes.kubernetes_job import RunningJob
        from metaflow.plugins.kubernetes.kubernetes_jobsets import RunningJobSet

        for kind, fetches in ((RunningJob, ("_fetch_job",)), (RunningJobSet, ("_fetch_jobset",))):
            for name in (*fetches, "_fetch_pod"):
                setattr(kind, name, _patient(getattr(kind, name)))
            _watch(kind, seen, _kubernetes_job)


def _kubernetes_job(job: Any) -> WaitedJob:
    kind: Literal["job", "jobset"] = "job" if hasattr(job, "_job") else "jobset"
    return WaitedJob(backend="kubernetes", kind=kind, name=job._name, namespace=job._namespace)


def _batch_job(job: Any) -> WaitedJob:
    return WaitedJob(backend="batch", kind="batch job", name=job._id, client=job._client, info=job._data)


def _watch(kind: type[Any], seen: Callable[[WaitedJob], None], view: Callable[[Any], WaitedJob]) -> None:
    own: Any = kind.__dict__["is_done"]

    def is_done(self: Any) -> bool:
        done = bool(own.fget(self))
        if not done:
            try:
                seen(view(self))
            except UserError as error:
                say(error.problem)
                say(error.advice)
                raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None
        return done

    kind.is_done = property(is_done)


def metadata_kind() -> str:
    """The metadata provider of the run that this process launches: "local" or "service"."""
    return str(click.get_current_context().find_root().obj.metadata.TYPE)


def on_batch_client(prepare: Callable[[Any], None]) -> None:
    """Call ``prepare`` with each boto3 client by which Metaflow submits and watches Batch jobs."""
    if (_words() or [""])[0] != "batch":
        return
    from metaflow.plugins.aws.batch.batch_client import BatchClient

    if hasattr(BatchClient.__init__, "__wrapped__"):
        return
    own = BatchClient.__init__

    @functools.wraps(own)
    def prepared(self: Any) -> None:
        own(self)
        prepare(self._client)

    BatchClient.__init__ = prepared


def waited_attempt() -> tuple[str, str, int]:
    """Run, step and attempt of the task that this process (Metaflow's ``kubernetes step``) waits for."""
    asked = click.get_current_context().params
    return str(asked["run_id"]), str(asked["step_name"]), int(asked["retry_count"] or 0)


def put_batch_in_words(
    words: Callable[[Exception, str], UserError], ended: Callable[[WaitedJob], None]
) -> None:
    """The same as :func:`put_in_words` for AWS Batch; ``words`` is given the id of a job that is left.

    ``ended`` hears of a step that has failed.
    """
    from metaflow.plugins.aws.batch.batch import Batch

    if (_words() or [""])[0] != "batch" or hasattr(Batch.wait, "__wrapped__"):
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
                ended(_batch_job(job))
                raise  # a step that has failed: Metaflow says how in a line
            found = words(error, job.id if job is not None and not _terminated(job) else "")
            say(found.problem)
            say(found.advice)
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

    if (_words() or [""])[0] != "kubernetes" or hasattr(Kubernetes.wait, "__wrapped__"):
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
            atexit.register(_hurry)  # called before Metaflow's own, which asks for the job's state once more
        except Exception as error:
            job = getattr(self, "_job", None)
            if isinstance(error, MetaflowException) and job is not None:
                for line in endings(_kubernetes_job(job)):
                    say(line)
                raise
            name = f"{_kubernetes_job(job).what} in namespace {job._namespace}" if job is not None else ""
            _hurry()
            found = words(error, name)
            say(found.problem)
            say(found.advice)
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None

    return clean


def _hurry() -> None:
    global _patience_s
    _patience_s = 0.0


_patience_s = API_SERVER_GONE_S
_PROBLEMS = {401: "doesn't take this login any more", 403: "allows this no longer"}


def _patient(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same question, asked again while the API server doesn't answer, or takes the login for outdated.

    The login is read anew each time, as somebody may renew it.
    """

    @functools.wraps(fetch)
    def patient(self: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        began, said = time.monotonic(), ""
        while True:
            try:
                found = fetch(self)
                self._answered = True
                return found
            except (HTTPError, ApiException) as error:
                status = getattr(error, "status", None)
                gone = not status or status in (401, 429) or status >= 500
                # A server that has just started refuses for a moment what it has not yet read the roles for.
                gone = gone or (status == 403 and hasattr(self, "_answered"))
                if not gone or time.monotonic() - began >= _patience_s:
                    raise
            problem = _PROBLEMS.get(status or 0, "doesn't answer")
            if problem != said:
                say(f"The Kubernetes API {problem}; asking on for {_patience_s / 60:g} minutes.")
                said = problem
            time.sleep(2)
            if status == 401:
                self._client._refresh_client()

    return patient


class _Outlived(CatchDecorator):  # type: ignore[misc]
    """``@catch`` for nodes' steps, those on several nodes of Kubernetes too.

    Metaflow runs a failed step's fallback in the process's own place, where the run was launched; what it
    misses of the pods' environment there is one more exception that is caught. A deployment has no such
    place: Argo would ask for all the nodes once more, only to note on them that they were lost.
    """

    name = "outlived"

    def step_task_retry_count(self) -> tuple[int, int]:
        own, errors = super().step_task_retry_count()
        return own, 0 if command() == "deploy" else errors


def outlived(var: str) -> Callable[[Any], Any]:
    """A step decorator: where the step fails the flow goes on, with the exception as artifact ``var``."""
    wrapped: Callable[[Any], Any] = _base_step_decorator(_Outlived, var=var, print_exception=False)
    return wrapped


def before_retry(step: StepView, backend: Backend, prepare: Callable[[str, int], dict[str, str]]) -> None:
    """Call ``prepare(run id, attempt)`` before a step's every attempt but the first is started.

    In the process that runs the flow. The decorator's values go into the attempt's command right after it;
    what it returns are environment variables for the process that waits for the container.
    """
    found = step._find(backend)
    begin = found.runtime_step_cli

    def runtime_step_cli(cli_args: Any, retry_count: int, *others: Any) -> None:
        if retry_count > 0:
            with user_errors():
                cli_args.env.update(prepare(str(cli_args.task.run_id), retry_count))
        begin(cli_args, retry_count, *others)

    found.runtime_step_cli = runtime_step_cli


def local_node_command() -> tuple[str, str]:
    """Two words by which the command line of another node's local task is known.

    A local ``@parallel`` step runs its other nodes as children of the first one's task.
    """
    return "--ubf-context", UBF_TASK


def card() -> Any | None:
    """This task's ``finetune`` card (Metaflow's CardComponentManager); None where the step has none."""
    from metaflow import current

    return current.card[CARD_ID] or None if "card" in current else None


_PAGE_S = 60.0  # for a page; it is done in two or three where the datastore answers


def push_card(manager: Any, ending: threading.Event | None = None) -> None:
    """Publish a card's page as it is now, and return when that is done (or the step is ending).

    Starts two processes of the flow's ``card create`` command, one after the other: the page, and the
    token by which an open page knows that it is outdated. A page that isn't made in a minute is given up.
    """
    if _given_up:
        return
    manager._render_seq += 1
    manager._last_layout_change = manager.components.layout_last_changed_on
    manager._card_proc("render_runtime")
    card = manager._card_creator_args["card_uuid"]
    page, _ = CardProcessManager._get_card_process(card)
    deadline = time.monotonic() + _PAGE_S
    while page is not None and page.poll() is None:  # Metaflow's own waiting would take a whole core
        if time.monotonic() > deadline:
            CardProcessManager._remove_card_process(card)
            return
        if ending is None:
            time.sleep(0.05)
        elif ending.wait(0.05):
            return
    manager._card_proc("refresh", sync=True)


def storage() -> Any:
    """The storage behind this run's datastore: Metaflow's DataStoreStorage of local, S3, GS or Azure."""
    if system_context.flow_datastore is None:
        raise RuntimeError("no flow is running in this process")
    return system_context.flow_datastore._storage_impl


def configured_storage() -> Any:
    """The storage of the datastore that Metaflow is configured with, outside of any run."""
    from metaflow.metaflow_config import DEFAULT_DATASTORE
    from metaflow.plugins import DATASTORES

    kind = next(kind for kind in DATASTORES if kind.TYPE == DEFAULT_DATASTORE)
    return kind(kind.get_datastore_root_from_config(lambda *_, **__: None))


def s3_client(*, impatient: bool = False) -> tuple[Any, type[Exception]]:
    """Metaflow's boto3 client for S3 and the class of its errors; ``impatient``: it asks once, briefly."""
    from botocore.config import Config
    from metaflow.metaflow_config import DATATOOLS_CLIENT_PARAMS
    from metaflow.plugins.datatools.s3.s3util import get_s3_client

    if not impatient:
        client, error = get_s3_client()
        return client, error
    own = DATATOOLS_CLIENT_PARAMS.get("config") or Config()
    own = own if isinstance(own, Config) else Config(**own)
    brief = own.merge(Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}))
    client, error = get_s3_client(s3_client_params={**DATATOOLS_CLIENT_PARAMS, "config": brief})
    return client, error


DATASTORE_TIMEOUT = "FINETUNE_DATASTORE_TIMEOUT"  # minutes
S3_LIMITS = (
    "METAFLOW_S3_RETRY_COUNT",
    "METAFLOW_S3_TRANSIENT_RETRY_COUNT",
    "METAFLOW_S3_CLIENT_RETRY_CONFIG",
)
_S3_ATTEMPTS = {"total_max_attempts": 3, "mode": "adaptive"}  # boto3's, of each of Metaflow's
_S3_SOCKETS = {"connect_timeout": 20, "read_timeout": 30}  # seconds
_limited = False
_given_up = False


def datastore_away_s() -> float:
    """How long a datastore may be away under a run. Raises UserError where that is no number of minutes."""
    text = os.environ.get(DATASTORE_TIMEOUT) or "5"
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise UserError(
            f"{DATASTORE_TIMEOUT}={text}: it is a number of minutes, and above 0.",
            "Unset it for 5 minutes.",
        )
    return minutes * 60


def limit_datastore() -> None:
    """Have Metaflow give an operation on S3 up after about half of :func:`datastore_away_s`.

    Left alone, Metaflow 2.19.39 makes 21 attempts, and waits up to 6 minutes before each. What the user has
    set stands. Holds for this process and those that it starts; ``S3_LIMITS`` are the variables.
    """
    global _limited
    from metaflow import metaflow_config
    from metaflow.metaflow_config_funcs import config_values
    from metaflow.plugins.datatools.s3 import s3, s3util

    if _limited:
        return
    # Metaflow sleeps 1, 2, 4... seconds, after the last attempt too
    retries = max(1, int(math.log2(datastore_away_s() / 2 + 1)) - 1)
    log_retries = min(2, retries)  # of the step's log, which is asked for again anyway
    _limited = True
    own = dict(config_values())
    for name, value in zip(S3_LIMITS, (log_retries, retries, _S3_ATTEMPTS), strict=True):
        os.environ.setdefault(name, own.get(name) or json.dumps(value))
    if S3_LIMITS[0] not in own:
        s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = log_retries
    if S3_LIMITS[1] not in own:
        s3.S3_TRANSIENT_RETRY_COUNT = retries
    if S3_LIMITS[2] not in own:
        metaflow_config.S3_CLIENT_RETRY_CONFIG = dict(_S3_ATTEMPTS)
    if "METAFLOW_DATATOOLS_CLIENT_PARAMS" not in own:
        metaflow_config.DATATOOLS_CLIENT_PARAMS.setdefault("config", dict(_S3_SOCKETS))


def give_datastore_up() -> None:
    """From now on Metaflow asks S3 once, in this process and in those that it starts."""
    global _given_up
    from metaflow.plugins.datatools.s3 import s3, s3util

    _given_up = True
    s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = s3.S3_TRANSIENT_RETRY_COUNT = 0
    os.environ |= dict.fromkeys(S3_LIMITS[:2], "0")


def datastore_variables() -> dict[str, str]:
    """The limits on the datastore, for a container. Raises UserError, as :func:`datastore_away_s`."""
    limit_datastore()
    return {name: os.environ[name] for name in (DATASTORE_TIMEOUT, *S3_LIMITS) if name in os.environ}


def flow_name() -> str:
    return str(system_context.flow.name)


def run_id() -> str:
    return str(system_context.run_id)


def origin_run_id() -> str | None:
    """The run that this task's run was resumed from."""
    from metaflow import current

    origin = current.origin_run_id
    return str(origin) if origin else None


def ensure_user() -> None:
    """Give Metaflow a user's name where the machine has none for it, as in a container run by root."""
    if get_username() is None:
        os.environ["USERNAME"] = "local"


def ensure_python() -> None:
    """Let ``python`` be this interpreter for the run's tasks.

    Metaflow starts a local ``@parallel`` step's other nodes by that name, and a virtual environment that
    is used without being activated is not on the PATH.
    """
    folder = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])


def say(text: str) -> None:
    """One line for the person at the terminal; never on standard output, which commands may fill."""
    print(text, file=sys.stderr, flush=True)
