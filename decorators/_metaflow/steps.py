"""A step as seen by a mutator: the user's values, the parameters of the run, and decorators to edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from metaflow import IncludeFile, current
from metaflow._vendor import click
from metaflow.datastore import FlowDataStore, TaskDataStoreSet
from metaflow.parameters import DelayedEvaluationParameter, deploy_time_eval
from metaflow.plugins import STEP_DECORATORS
from metaflow.system_context import system_context

from decorators._metaflow.cards import CARD_ID
from decorators._metaflow.commands import DEPLOYERS, Backend, command, command_arguments, deployer
from decorators._metaflow.endings import origin_run, stored_tasks

_USER_VALUES = "_finetune_given"


@dataclass(frozen=True, kw_only=True)
class UserValue:
    """A value that the user set, and where: ``by`` is for example ``--with kubernetes:memory=``."""

    value: Any
    by: str


class StepView:
    """View of a step for its mutator, which may read and change it."""

    def __init__(self, mutable_step: Any) -> None:
        self._mutable = mutable_step
        self._step = mutable_step._my_step

    @property
    def name(self) -> str:
        return str(self._step.name)

    def steps(self) -> list[StepView]:
        """Return all steps of the flow, including this one."""
        return [StepView(step) for _, step in self._mutable.flow.steps]

    def mutators(self, kind: type[Any]) -> list[Any]:
        """Return the step's mutators of one class."""
        return [mutator for mutator in self._step.config_decorators if isinstance(mutator, kind)]

    def backend(self) -> Backend:
        """Return the backend of the step, including ``--with`` and deployments."""
        remote: tuple[Backend, ...] = get_args(Backend)[1:]
        for name in remote:
            if self._find(name) is not None:
                return name
        arguments = command_arguments()
        return DEPLOYERS.get(arguments[0], "local") if arguments else "local"

    def has(self, decorator: str) -> bool:
        return self._find(decorator) is not None

    def user_values(self, decorator: str) -> dict[str, UserValue]:
        """Return the values that the user set in a decorator, in the flow or with ``--with``."""
        deco = self._find(decorator)
        if deco is None or deco.inserted_by:
            return {}
        by = f"@{decorator} in the flow" if deco.statically_defined else f"--with {decorator}"
        return {
            name: UserValue(value=value, by=by if deco.statically_defined else f"{by}:{name}=")
            for name, value in getattr(deco, _USER_VALUES).items()
            if value is not None
        }

    def values(self, decorator: str) -> dict[str, Any]:
        """Return all values of a decorator, completed from Metaflow's configuration; empty if the step lacks
        it.

        In a deployment the compute decorator is added after the mutators ran; the values it will have are
        returned.
        """
        deco = self._find(decorator)
        if deco is None and DEPLOYERS.get(deployer() or "") == decorator:
            deco = next(kind() for kind in STEP_DECORATORS if kind.name == decorator)
            deco.external_init()
        return dict(deco.attributes) if deco is not None else {}

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        """Update the values of a decorator; add the decorator if the step lacks it."""
        deco = self._find(decorator)
        if deco is None:
            self._mutable.add_decorator(decorator, deco_kwargs=values)
        else:
            deco.attributes.update(values)

    def add_environment(self, variables: dict[str, str]) -> None:
        """Add environment variables to the step's container."""
        self.set_values(
            "environment", {"vars": {**(self.values("environment").get("vars") or {}), **variables}}
        )

    def add_card(self, refresh_seconds: float) -> None:
        """Add the live card, unless the step already has a card with the same id."""
        if not any(d.name == "card" and d.attributes.get("id") == CARD_ID for d in self._step.decorators):
            self._mutable.add_decorator(
                "card", deco_kwargs={"type": "blank", "id": CARD_ID, "refresh_interval": refresh_seconds}
            )

    def flow_values(self) -> dict[str, Any]:
        """Return the run's parameters (by name, dashes as underscores) and configs."""
        configs = {name: _plain(value) for name, value in self._mutable.flow.configs}
        return configs | self.parameter_values()

    def parameter_values(self) -> dict[str, Any]:
        """Return the run's parameters (by name, dashes as underscores)."""
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
        """Map each name in :meth:`parameter_values` to the attribute that holds it in a task's flow.

        Parameters that are files are omitted, because their content is not read.
        """
        declared = dict(self._mutable.flow.parameters)
        return {
            _key(parameter): variable
            for variable, parameter in declared.items()
            if not isinstance(parameter, IncludeFile)
        }

    def _origin_parameters(self, declared: dict[str, Any]) -> dict[str, Any]:
        tasks = stored_tasks(*_origin(), steps=["_parameters"], prefetch_data_artifacts=list(declared))
        return {_key(p): tasks[0][var] for var, p in declared.items() if var in tasks[0]}

    def _find(self, name: str) -> Any:
        for decorator in self._step.decorators:
            if decorator.name == name:
                decorator.external_init()  # evaluates config expressions; idempotent
                if not hasattr(decorator, _USER_VALUES):
                    values = {k: decorator.attributes.get(k) for k in decorator._user_defined_attributes}
                    setattr(decorator, _USER_VALUES, values)
                return decorator
        return None


def resumed_artifact(step: str, name: str) -> Any:
    """Return an artifact of the run that ``resume`` starts from; None if that step did not store it."""
    tasks = TaskDataStoreSet(*_origin(), steps=[step], prefetch_data_artifacts=[name])
    return next((task[name] for task in tasks if name in task), None)


def set_current(name: str, value: Any) -> None:
    """Publish a value to the step's code as ``current.<name>``."""
    current._update_env({name: value})


def _origin() -> tuple[FlowDataStore, str]:
    """Return the datastore of the flow, and the id of the run that ``resume`` starts from."""
    context = click.get_current_context()
    flow = system_context.flow
    run_id = context.params.get("origin_run_id") or origin_run(context.obj.echo, flow.name)
    return FlowDataStore(flow.name), str(run_id)


def _run_parameters() -> dict[str, Any]:
    context = click.get_current_context()
    while context is not None and context.info_name != "run":
        context = context.parent
    parsed = dict(context.params) if context else {}
    # Reading an IncludeFile parameter would upload the file, which is left to the run.
    return {k: v for k, v in parsed.items() if not isinstance(v, DelayedEvaluationParameter)}


def _key(parameter: Any) -> str:
    return str(parameter.name).replace("-", "_").lower()


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value
