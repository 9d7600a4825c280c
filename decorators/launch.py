"""Common parts of step mutators: decide at launch, and pass the decision on to later processes.

Metaflow calls a mutator in every process that loads the flow: in the launching process, in the process that
waits for a remote step, and in the step's task. Decisions are made only at launch and passed on in
environment variables: local tasks inherit them, containers get them through ``@environment``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from decorators import _metaflow
from decorators._metaflow import Backend, FinetuneError, StepView, UserValue, deployer
from decorators.backends import pending
from decorators.backends.interface import Destination, MinimumRequest, StepRequest
from decorators.backends.job_labels import labels_of
from decorators.backends.kubernetes import older_jobsets
from decorators.backends.options import Options
from decorators.backends.overrides import apply_user_values, merge_user_values
from decorators.backends.placing import add_variables, apply_launch
from estimator import logs
from estimator.errors import UserError
from estimator.plan import Request

_DEPLOYED = (
    "Deploy to Argo Workflows (argo-workflows create), or `finetune flow linear` to Step Functions; "
    "Airflow can start either, or a launcher's Job (infra/kubernetes/examples/launcher)."
)
T = TypeVar("T")


class LaunchMixin:
    """Mixin for a ``StepMutator`` whose ``mutate`` calls :meth:`decide_or_apply`."""

    carried: tuple[str, ...]
    """Environment variables that are passed on to the step's containers."""

    def at_launch(self, step: StepView) -> None:
        """Decide, and apply the decision to the step. Raises FinetuneError."""
        raise NotImplementedError

    def is_launched(self) -> bool:
        """Whether the launch made a decision for this step; called in the process that waits."""
        return True

    def store_pod_failures(self, lines: list[str]) -> None:
        """Receive one line per failed pod of the step, in the process that waits."""

    def decide_or_apply(self, step: StepView) -> bool:
        """Decide at launch, or apply the decision in the process that waits; elsewhere return False."""
        kind = _metaflow.command()
        if kind in ("run", "resume", "deploy"):
            _metaflow.ensure_python()
            _metaflow.exclude_bytecode()
            if kind != "deploy":
                _metaflow.forward_signals_to_jobs()
            else:
                _check_deployable(step)
                _metaflow.label_jobs(labels_of)
                _metaflow.retry_deployed(step.steps())
                _warn_about_local_metadata()
                if deployer() == "argo-workflows":
                    _metaflow.compile_workflows(inspect.getsource(older_jobsets), _pending_s)
                elif deployer() == "step-functions":
                    _metaflow.compile_state_machines()
            self.at_launch(step)
        elif kind == "trampoline" and self.is_launched():
            apply_launch(step, self.store_pod_failures)
            if step.backend() == "kubernetes":
                _metaflow.label_jobs(labels_of)
        else:
            return False
        if step.backend() != "local":
            names = (*self.carried, *logs.VARIABLES)
            step.add_environment({name: os.environ[name] for name in names if name in os.environ})
            add_variables(step, _metaflow.datastore_variables())
        return True


@contextmanager
def user_errors_for_metaflow() -> Iterator[None]:
    """Convert a UserError at launch to an error that Metaflow prints."""
    try:
        yield
    except UserError as error:
        logs.show_traceback(error)
        raise FinetuneError(error.problem, error.advice) from None


def first_step(step: StepView, mutator: type[Any], decides: Callable[[Any], bool]) -> StepView:
    """Return the flow's first step whose mutator decides for all steps; ``step`` if there is none."""
    for other in step.steps():
        for decorator in other.mutators(mutator):
            decorator.external_init()
            if decides(decorator):
                return other
    return step


def user_values_of(step: StepView) -> dict[str, UserValue]:
    """Return the values that the user set in ``@resources``, the compute decorator, or ``--with``."""
    backend = step.backend()
    compute = step.user_values(backend) if backend != "local" else {}
    return merge_user_values(step.user_values("resources"), compute, backend)


def build_destination(step: StepView, options: Options) -> Destination:
    """Build a step's target from the current values of its decorators."""
    backend = step.backend()
    return Destination(
        backend=backend,
        options=options,
        user_values=user_values_of(step),
        configured=step.values(backend) if backend != "local" else {},
    )


def build_step_request(
    step: StepView, request: Request, options: Options, minimum: MinimumRequest | None = None
) -> StepRequest:
    """Build a step's request to its backend, including the user's values."""
    destination = build_destination(step, options)
    return StepRequest(
        step=step.name,
        backend=destination.backend,
        request=apply_user_values(request, destination.user_values, destination.backend)[0],
        options=options,
        user_values=destination.user_values,
        configured=destination.configured,
        minimum=minimum,
    )


class Once:
    """Call a function of the flow's parameters once per process, however many steps call it."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, function: Callable[..., T], parameters: Mapping[str, Any], backend: Backend, *arguments: Any
    ) -> T:
        key = (function, backend, *arguments, repr(sorted(parameters.items())))
        if key not in self._results:
            self._results[key] = function(parameters, backend, *arguments)
        result: T = self._results[key]
        return result


def _check_deployable(step: StepView) -> None:
    """Raise FinetuneError if the scheduler cannot run the flow, or no AWS region is configured for it."""
    if deployer() == "airflow":
        raise FinetuneError("These flows cannot be deployed to Airflow.", _DEPLOYED)
    if deployer() != "step-functions":
        return
    gangs = [other.name for other in step.steps() if other.has("parallel")]
    if gangs:
        raise FinetuneError(
            f"Step Functions cannot run step {gangs[0]}: Metaflow does not support @parallel there.",
            "Deploy to Argo Workflows (argo-workflows create), or deploy a flow for one node: "
            "`finetune flow linear`; for the checklist, see docs/checklist.md.",
        )
    if not _has_region():
        raise FinetuneError(
            "Step Functions and AWS Batch need an AWS region, and none is configured here.",
            "Set AWS_DEFAULT_REGION, or a region in the profile: aws configure set region us-east-1.",
        )


def check_nodes(step: StepView, request: Request) -> None:
    """Raise FinetuneError if the plan has several nodes and no step of the flow is parallel."""
    if request.nodes > 1 and not any(other.has("parallel") for other in step.steps()):
        raise FinetuneError(
            f"The plan needs {request.nodes} nodes, but no step of this flow is @parallel.",
            "Use one node (--nodes 1), or a flow with a @parallel step, like `finetune run`.",
        )


@functools.cache
def _warn_about_local_metadata() -> None:
    """Warn once, when a flow is deployed with local metadata, that its runs will not be recorded."""
    if _metaflow.metadata_kind() == "local":
        _metaflow.print_line(
            "Runs of this deployment will not be recorded, because each pod has its own local metadata: "
            "`finetune runs`, `costs`, cards, resume and the checklist's history will not find them.\n"
            "Deploy with a metadata service: METAFLOW_DEFAULT_METADATA=service, METAFLOW_SERVICE_URL."
        )


def _pending_s() -> float:
    """Return the seconds that a deployed step's pods may wait for nodes, as set at launch."""
    return 60 * float(os.environ.get(pending.TIMEOUT_VARIABLE) or Options().pending_timeout)


def _has_region() -> bool:
    """Whether boto3 finds a region; True without boto3, because Metaflow reports that."""
    try:
        import boto3
    except ImportError:
        return True
    return bool(boto3.session.Session().region_name)
