"""Common parts of step mutators: decide at launch, and pass the decision on to later processes.

Metaflow calls a mutator in every process that loads the flow: where the run is launched, in the process that
waits for a remote step, in the step's task. Only at the launch is anything decided. From there it travels in
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
from decorators._metaflow import Backend, FinetuneError, Given, StepView, deployer
from decorators.backends import pending
from decorators.backends.interface import Destination, MinimumRequest, StepRequest
from decorators.backends.job_labels import labels_of
from decorators.backends.kubernetes import older_jobsets
from decorators.backends.options import Options
from decorators.backends.overrides import apply_given, merge_given
from decorators.backends.placing import add_variables, carry_on
from estimator import logs
from estimator.errors import UserError
from estimator.plan import Request

_DEPLOYED = (
    "Deploy to Argo Workflows (argo-workflows create), or `finetune flow linear` to Step Functions; "
    "Airflow can start either, or a launcher's Job (infra/kubernetes/examples/launcher)."
)
T = TypeVar("T")


class LaunchMixin:
    """Mixin for a ``StepMutator`` whose ``mutate`` calls :meth:`launch_or_carry`."""

    carried: tuple[str, ...]
    """Environment variables that the step's containers are to have, too."""

    def at_launch(self, step: StepView) -> None:
        """Decide, and write the decision into the step. Raises FinetuneError."""
        raise NotImplementedError

    def is_launched(self) -> bool:
        """Whether the launch left a decision to carry on with; called in the process that waits."""
        return True

    def keep_endings(self, lines: list[str]) -> None:
        """Receive one line per failed pod of the step, in the process that waits."""

    def launch_or_carry(self, step: StepView) -> bool:
        """Decide at launch, carry the decision on in the process that waits; False in all other processes."""
        kind = _metaflow.command()
        if kind in ("run", "resume", "deploy"):
            _metaflow.ensure_python()
            _metaflow.leave_bytecode_out()
            if kind != "deploy":
                _metaflow.end_with_jobs()
            elif deployer() == "airflow":
                raise FinetuneError("These flows can't be deployed to Airflow.", _DEPLOYED)
            else:
                _metaflow.label_jobs(labels_of)
                _metaflow.retry_deployed(step.steps())
                _say_without_metadata()
                if deployer() == "argo-workflows":
                    _metaflow.compile_workflows(inspect.getsource(older_jobsets), _pending_s)
                elif deployer() == "step-functions":
                    _metaflow.compile_state_machines()
            self.at_launch(step)
        elif kind == "trampoline" and self.is_launched():
            carry_on(step, self.keep_endings)
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
def refused_in_words() -> Iterator[None]:
    """At launch: convert a UserError to an error that Metaflow prints."""
    try:
        yield
    except UserError as error:
        logs.show_traceback(error)
        raise FinetuneError(error.problem, error.advice) from None


def first_step(step: StepView, mutator: type[Any], decides: Callable[[Any], bool]) -> StepView:
    """Return the flow's first step whose mutator decides for all steps; this step if there is none."""
    for other in step.steps():
        for each in other.mutators(mutator):
            each.external_init()
            if decides(each):
                return other
    return step


def given_values(step: StepView) -> dict[str, Given]:
    """Return the values that the user wrote into ``@resources``, the compute decorator, or ``--with``."""
    backend = step.backend()
    compute = step.given(backend) if backend != "local" else {}
    return merge_given(step.given("resources"), compute, backend)


def build_destination(step: StepView, options: Options) -> Destination:
    """Describe where a step runs, with its decorators' current values."""
    backend = step.backend()
    return Destination(
        backend=backend,
        options=options,
        given=given_values(step),
        configured=step.values(backend) if backend != "local" else {},
    )


def build_step_request(
    step: StepView, request: Request, options: Options, minimum: MinimumRequest | None = None
) -> StepRequest:
    """Build a step's request to its backend, with the user's values in it."""
    going_to = build_destination(step, options)
    return StepRequest(
        step=step.name,
        backend=going_to.backend,
        request=apply_given(request, going_to.given, going_to.backend)[0],
        options=options,
        given=going_to.given,
        configured=going_to.configured,
        minimum=minimum,
    )


class Once:
    """Call a function of the flow's parameters once per process, however many steps call it."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, ask: Callable[..., T], parameters: Mapping[str, Any], backend: Backend, *more: Any
    ) -> T:
        key = (ask, backend, *more, repr(sorted(parameters.items())))
        if key not in self._answers:
            self._answers[key] = ask(parameters, backend, *more)
        answer: T = self._answers[key]
        return answer


def check_deployable(step: StepView) -> None:
    """Raise FinetuneError if the scheduler does not support ``@parallel``, or no AWS region is configured."""
    if deployer() != "step-functions":
        return
    gangs = [other.name for other in step.steps() if other.has("parallel")]
    if gangs:
        raise FinetuneError(
            f"Step Functions can't run step {gangs[0]}: Metaflow has no @parallel there.",
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
            f"The plan is for {request.nodes} nodes, and no step of this flow is @parallel.",
            "Ask for one node (--nodes 1), or use a flow with such a step, as that of `finetune run`.",
        )


@functools.cache
def _say_without_metadata() -> None:
    """Say once, where a flow is deployed, that its runs will be found by nothing."""
    if _metaflow.metadata_kind() == "local":
        _metaflow.say(
            "The runs of this deployment will be in no metadata, as each pod would keep its own: "
            "`finetune runs`, `costs`, cards, resume and the checklist's past find nothing of them.\n"
            "Deploy with a metadata service: METAFLOW_DEFAULT_METADATA=service, METAFLOW_SERVICE_URL."
        )


def _pending_s() -> float:
    """Seconds that a deployed step's pods may wait for nodes, as the launch has set it."""
    return 60 * float(os.environ.get(pending.TIMEOUT_VARIABLE) or Options().pending_timeout)


def _has_region() -> bool:
    """Whether boto3 finds a region; True without boto3, which Metaflow reports itself."""
    try:
        import boto3
    except ImportError:
        return True
    return bool(boto3.session.Session().region_name)
