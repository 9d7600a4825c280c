"""A step as a mutator sees it: what the user gave, the parameters' values, decorators to edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from metaflow import IncludeFile, current
from metaflow._vendor import click
from metaflow.datastore import FlowDataStore, TaskDataStoreSet
from metaflow.parameters import DelayedEvaluationParameter, deploy_time_eval
from metaflow.plugins import STEP_DECORATORS
from metaflow.system_context import system_context
from metaflow.util import get_latest_run_id

from decorators._metaflow.cards import CARD_ID
from decorators._metaflow.commands import DEPLOYERS, Backend, command, command_words, deployer
from decorators._metaflow.endings import FinetuneError

_GIVEN = "_finetune_given"


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
        """Return the backend of the step, including ``--with`` and deployments."""
        remote: tuple[Backend, ...] = get_args(Backend)[1:]
        for name in remote:
            if self._find(name) is not None:
                return name
        words = command_words()
        return DEPLOYERS.get(words[0], "local") if words else "local"

    def has(self, decorator: str) -> bool:
        return self._find(decorator) is not None

    def given(self, decorator: str) -> dict[str, Given]:
        """Return the values that the user wrote into a decorator, in the flow or after ``--with``."""
        deco = self._find(decorator)
        if deco is None or deco.inserted_by:
            return {}
        by = f"@{decorator} in the flow" if deco.statically_defined else f"--with {decorator}"
        return {
            name: Given(value=value, by=by if deco.statically_defined else f"{by}:{name}=")
            for name, value in getattr(deco, _GIVEN).items()
            if value is not None
        }

    def values(self, decorator: str) -> dict[str, Any]:
        """All values of a decorator, Metaflow's own configuration filled in; empty when it isn't there.

        A deployment's compute decorator comes to the steps after their mutators: its values are those that it
        will have.
        """
        deco = self._find(decorator)
        if deco is None and DEPLOYERS.get(deployer() or "") == decorator:
            deco = next(kind() for kind in STEP_DECORATORS if kind.name == decorator)
            deco.external_init()
        return dict(deco.attributes) if deco is not None else {}

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        """Lay values over a decorator, adding it first where the step hasn't got it."""
        deco = self._find(decorator)
        if deco is None:
            self._mutable.add_decorator(decorator, deco_kwargs=values)
        else:
            deco.attributes.update(values)

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
        configs = {name: _plain(value) for name, value in self._mutable.flow.configs}
        return configs | self.parameter_values()

    def parameter_values(self) -> dict[str, Any]:
        """Parameters (by name, dashes as underscores) that the run will have."""
        values: dict[str, Any] = {}
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

    def parameter_variables(self) -> dict[str, str]:
        """Return the names by which a task's flow has its parameters, by those of :meth:`parameter_values`.

        Files are left out: their content is not read.
        """
        declared = dict(self._mutable.flow.parameters)
        return {
            _key(parameter): variable
            for variable, parameter in declared.items()
            if not isinstance(parameter, IncludeFile)
        }

    def _origin_parameters(self, declared: dict[str, Any]) -> dict[str, Any]:
        run_id, tasks = _origin_tasks("_parameters", list(declared))
        if not tasks:
            raise FinetuneError(
                f"Run {run_id} can't be resumed: its parameters are not in the datastore.",
                "Name another: resume --origin-run-id RUN",
            )
        return {_key(p): tasks[0][var] for var, p in declared.items() if var in tasks[0]}

    def _find(self, name: str) -> Any:
        for decorator in self._step.decorators:
            if decorator.name == name:
                decorator.external_init()  # evaluates config expressions; a second call does nothing
                if not hasattr(decorator, _GIVEN):
                    given = {k: decorator.attributes.get(k) for k in decorator._user_defined_attributes}
                    setattr(decorator, _GIVEN, given)
                return decorator
        return None


def resumed_artifact(step: str, name: str) -> Any:
    """An artifact of the run that ``resume`` starts from; None where that step has not left it."""
    _, tasks = _origin_tasks(step, [name])
    return next((task[name] for task in tasks if name in task), None)


def set_current(name: str, value: Any) -> None:
    """Make a value available in the step's code as ``current.<name>``."""
    current._update_env({name: value})


def _origin_tasks(step: str, artifacts: list[str]) -> tuple[str, list[Any]]:
    """(the run that ``resume`` starts from, the tasks of one of its steps)."""
    context = click.get_current_context()
    flow = system_context.flow
    run_id = context.params.get("origin_run_id") or get_latest_run_id(context.obj.echo, flow.name)
    if run_id is None:
        raise FinetuneError(
            "There is no run to resume: no earlier run of this flow is known here.",
            "Name one: resume --origin-run-id RUN",
        )
    found = TaskDataStoreSet(
        FlowDataStore(flow.name), run_id, steps=[step], prefetch_data_artifacts=artifacts
    )
    return str(run_id), list(found)


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
