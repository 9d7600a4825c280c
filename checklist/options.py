"""Options of the checklist: typed models from which flags, flow parameters and YAML files derive.

:class:`Options` are the inputs of a run, :class:`CommandOptions` those of ``python -m checklist``; the flow
adds the options of its backends (flows/cluster_check/launch.py). The text of a field is the help of its flag.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from checklist.effort import EFFORTS, Effort
from checklist.measurements import PHASES, PhaseName
from checklist.registry import Check, Profile, phases_of, select
from checklist.round_robin import ALL_PAIRS_UP_TO, MORE_ROUNDS, schedule
from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.untrusted import parse_yaml as parse_yaml_text

Device = Literal["auto", "cpu", "cuda"]
MAX_NODES = 4096
MAX_SHARE = 0.25  # share of the cluster's nodes; more bad nodes suggest a common cause
START_S = 60.0
ROUNDS_WITHIN_LIMIT = 8  # rounds of pairs; with more, the phase's limit grows in proportion
_NO_FLAG: JsonDict = {"flag": False}
_KINDS = {  # expected value, by the beginning of pydantic's error type
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "names with commas between",
    "is_instance": "a path",
}
M = TypeVar("M", bound="_Model")


def names(value: Any) -> Any:
    """Split names as users write them ("mesh,pairs", several flags, or both). Return other types
    unchanged.
    """
    if not isinstance(value, str | list | tuple):
        return value
    items = [value] if isinstance(value, str) else map(str, value)
    return tuple(name.strip() for part in items for name in part.split(",") if name.strip())


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


def _path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and value else _none_if_empty(value)


Names = Annotated[tuple[str, ...], BeforeValidator(names)]
Text = Annotated[str | None, BeforeValidator(_none_if_empty)]
File = Annotated[Path | None, BeforeValidator(_path)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, defer_build=True
    )

    def __reduce__(self) -> tuple[Any, ...]:
        # Metaflow compares artifacts by their bytes, and pydantic's own state has a set, whose order varies
        return type(self).model_validate, (dict(self),)


class CheckOptions(_Model):
    """Selection and depth of checks, the same for the command and the flow."""

    nodes: int = 2
    """Nodes to test."""
    gpus_per_node: int | None = None
    """GPUs per node, one rank each. (default: all GPUs of this node; on CPUs 1 rank)"""
    profile: Profile = "quick"
    """Depth of the checks: quick, standard or deep."""
    only: Names = ()
    """Checks to run, separated by commas."""
    skip: Names = ()
    """Checks to skip, separated by commas."""
    device: Device = "auto"
    """Device to test: auto (GPUs if there are any), cpu or cuda."""
    timeout: float | None = None
    """Time limit of each phase in seconds. (default: by profile)"""
    op_timeout: float | None = None
    """Seconds after which one operation counts as hung. (default: by profile)"""
    thresholds: File = None
    """CSV file with thresholds that take precedence over the shipped ones."""
    system: Text = None
    """Name of this system in the thresholds, if machine type and GPU do not identify it."""
    expect: float | None = Field(default=None, gt=0)
    """Expected bus bandwidth of the largest all-reduce over all nodes, GB/s. (default: from the ports)"""
    suspects: Names = ()
    """Nodes to measure first and alone, separated by commas, e.g. one that delayed a training run."""
    reference_node: Text = None
    """Node with the correct settings: of this run, or of the result given by --reference-settings."""
    reference_settings: File = None
    """result.json of an earlier run whose nodes have the correct settings."""
    accept_baseline: bool = False
    """Ignore earlier runs: the history of the figures restarts with this run."""

    @model_validator(mode="after")
    def _check_options(self) -> CheckOptions:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UserError(f"--nodes {self.nodes} is out of range.", f"Use a number from 1 to {MAX_NODES}.")
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            raise UserError(
                f"--gpus-per-node {self.gpus_per_node} must be at least 1.",
                "Leave it out to use all GPUs of a node.",
            )
        _check_limit("each phase", self.timeout)
        _check_limit("an operation", self.op_timeout)
        select(self.only, self.skip)  # raises for unknown names
        return self

    @property
    def checks(self) -> tuple[Check, ...]:
        """Selected checks, in order."""
        return select(self.only, self.skip)

    def options(self, **extra: Any) -> Options:
        """Build the inputs of a run from these options and the caller's ``extra`` ones."""
        return build(Options, {**{name: getattr(self, name) for name in CheckOptions.model_fields}, **extra})


class Options(CheckOptions):
    """Options of one run, the same on every node."""

    directory: File = None
    """Folder on each node to measure. (default: the one for temporary files)"""
    datastore: Text = None
    """Store to measure: a folder on every node, or s3://bucket/prefix (at METAFLOW_S3_ENDPOINT_URL or
    AWS_ENDPOINT_URL of each node).
    """
    start_timeout: float | None = Field(default=None, json_schema_extra=_NO_FLAG)
    """Seconds that all ranks may take to join: 60; more on a cluster, where nodes and images may have to
    start.
    """
    phase_timeouts: dict[PhaseName, float] = Field(default_factory=dict, json_schema_extra=_NO_FLAG)
    """Time limit in seconds by phase, which takes precedence over `timeout`."""
    storage_bytes: int | None = Field(default=None, json_schema_extra=_NO_FLAG)
    """Bytes to write and read in the folder and the store, instead of the profile's size."""
    seed: int = Field(default=0, json_schema_extra=_NO_FLAG)
    """Seed of the rounds of pairs above 32 nodes."""

    @model_validator(mode="after")
    def _check_run(self) -> Options:
        for phase, limit in self.phase_timeouts.items():
            _check_limit(f"phase {phase}", limit)
        _check_limit("the start", self.start_timeout)
        if self.storage_bytes is not None and self.storage_bytes < 1:
            raise UserError(
                f"storage_bytes {self.storage_bytes} must be at least 1.", "Leave it out for the default."
            )
        if self.datastore is not None and not measurable(self.datastore):
            raise UserError(
                f"The datastore {self.datastore!r} cannot be measured.",
                "Give --datastore a folder that every node has, or s3://bucket/prefix.",
            )
        return self

    def of_nodes(self) -> Options:
        """Return the options sent to the nodes, without the reference file, which only the judging
        process reads.
        """
        if self.reference_settings is None:
            return self
        return self.model_copy(update={"reference_settings": None, "reference_node": None})

    @property
    def effort(self) -> Effort:
        return EFFORTS[self.profile]

    @property
    def phases(self) -> tuple[PhaseName, ...]:
        """Phases required by the checks, in order."""
        names = phases_of(self.checks)
        return tuple(phase for phase in names if phase != "diag" or self.effort.dcgm_level)

    def limit_s(self, phase: PhaseName) -> float:
        """Return the time limit of a phase in seconds."""
        limit = self.phase_timeouts.get(phase, self.timeout)
        if limit is not None:
            return limit
        limit = float(self.effort.phase_limits_s[phase])
        if phase == "pairs":
            extra = MORE_ROUNDS if self.nodes > ALL_PAIRS_UP_TO else 0
            limit *= max(1.0, (len(schedule(self.nodes, seed=self.seed)) + extra) / ROUNDS_WITHIN_LIMIT)
        return limit

    @property
    def hang_limit_s(self) -> float:
        """Seconds after which an operation counts as hung."""
        return self.effort.op_limit_s if self.op_timeout is None else self.op_timeout

    @property
    def start_limit_s(self) -> float:
        """Seconds that all ranks may take to join."""
        return START_S if self.start_timeout is None else self.start_timeout

    def processes_per_node(self, visible_gpus: int) -> int:
        """Return the ranks per node for this node's number of GPUs. Raises UserError if there are too few."""
        if self.device == "cpu" or (self.device == "auto" and not visible_gpus):
            return self.gpus_per_node or 1
        if not visible_gpus:
            raise UserError("There is no GPU on this machine.", "Leave out --device cuda to test on CPUs.")
        processes = self.gpus_per_node or visible_gpus
        if processes > visible_gpus:
            raise UserError(
                f"--gpus-per-node {processes} is more than the {visible_gpus} of this machine.",
                f"Give at most {visible_gpus}, or leave it out.",
            )
        return processes


with warnings.catch_warnings():
    # BaseModel has a json() too, which is deprecated and not used here
    warnings.filterwarnings("ignore", message='Field name "json"')

    class OutputOptions(_Model):
        """Destinations of the result."""

        json: File = None  # type: ignore[assignment]
        """File for the result. (default: none; for a flow on this machine checklist-result.json)"""
        webhook: bool = False
        """Post the result to the address in $CHECKLIST_WEBHOOK_URL."""
        prometheus: File = None
        """Text file for node_exporter; its name ends in .prom."""
        pushgateway: Text = None
        """Address of a Prometheus Pushgateway, http://HOST:9091."""
        cloudwatch: Text = None
        """File to which to append a line of CloudWatch's embedded metrics; - prints it."""
        taint: bool = False
        """Taint bad nodes in Kubernetes; without --apply, only print what would change."""
        label: bool = False
        """Label nodes in Kubernetes as fit or unfit; without --apply, only print what would change."""
        apply: bool = False
        """Mark the nodes; without it, only print what would change."""
        most_share: float = MAX_SHARE
        """Maximum share of the cluster's nodes that may be marked in total."""

        @model_validator(mode="after")
        def _check_outputs(self) -> OutputOptions:
            if self.taint and self.label:
                raise UserError("--taint and --label exclude each other.", "Choose one way of marking nodes.")
            return self


class CommandOptions(OutputOptions, Options):
    """Options of ``python -m checklist``."""

    nodes: int = 2
    """Expected number of nodes. (default: the launcher's, else 2 local)"""
    node_name: Text = None  # torchrun would take a mere --node for its own --node-rank
    """Name of this host in the cluster. (default: $NODE_NAME, the instance, the host)"""
    cluster: str = "default"
    """Name of this cluster in messages and metrics."""
    keep: File = None
    """Folder for logs and journals."""
    history: File = None
    """File or folder of earlier runs to compare with; this run is added to it."""
    context: Text = None
    """Context of the kubeconfig. (default: the current one)"""


# ---- from people's values to a model, and from a model to flags


def build(kind: type[M], values: Mapping[str, Any]) -> M:
    """Build the options from values by name; None means not given. Raises UserError for the first mistake."""
    try:
        return kind.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise _explain(error, kind) from None


def parse_yaml(kind: type[M], text: str) -> M:
    """Parse a YAML file of options, with defaults for the others. Raises UserError."""
    try:
        values = parse_yaml_text(text) or {}
    except yaml.YAMLError as error:
        raise UserError(
            f"The options are not YAML: {' '.join(str(error).split())}", "Correct the file."
        ) from None
    if not isinstance(values, dict):
        raise UserError("The options are not a mapping.", "Write lines such as `nodes: 4`.")
    return build(kind, {str(name): value for name, value in values.items()})


def flags(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that are flags, by name."""
    return {name: field for name, field in kind.model_fields.items() if field.json_schema_extra != _NO_FLAG}


def type_of(field: FieldInfo) -> type:
    """Return the type of one value of the option: bool (a flag), int, float, Path or str.

    tuple: names separated by commas.
    """
    kinds: Sequence[Any] = [field.annotation]
    if get_origin(field.annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    origin: Any = get_origin(kinds[0])
    kind: type = str if origin is Literal else origin or kinds[0]
    return kind


def help_of(field: FieldInfo) -> str:
    """Return the option's purpose as one line."""
    return " ".join((field.description or "").split())


def flat(options: _Model) -> dict[str, Any]:
    """Return the values as strings, as parameters of a flow hold them; "" for None."""

    def word(value: Any, kind: type) -> Any:
        if kind is tuple:
            return ",".join(value)
        if kind in (str, Path):
            return "" if value is None else str(value)
        return value

    return {
        name: word(getattr(options, name), type_of(field)) for name, field in flags(type(options)).items()
    }


def json_schema(kind: type[_Model]) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file of these options, for editors."""
    schema = kind.model_json_schema()
    for name in ("only", "skip"):  # in a file also as one text
        names_ = schema["properties"][name]
        names_["anyOf"] = [{"type": "string"}, {"type": names_.pop("type"), "items": names_.pop("items")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def measurable(datastore: str) -> bool:
    """Return whether the store can be measured: a folder, or S3 with a bucket."""
    scheme, separator, path = datastore.partition("://")
    return bool(path.split("/")[0]) and scheme == "s3" if separator else bool(datastore)


def _explain(error: ValidationError, kind: type[_Model]) -> UserError:
    first = error.errors()[0]
    location, value, kind_of_error = first["loc"], first["input"], first["type"]
    name = str(location[0]) if location else ""
    if kind_of_error == "extra_forbidden":
        choices: Iterable[str] = kind.model_fields
        return UserError(
            f"There is no option {name!r}.",
            f"{did_you_mean(name, choices)} It takes {', '.join(choices)}.".lstrip(),
        )
    if kind_of_error == "literal_error":
        phase = location[-1] == "[key]"
        noun, choices = ("phase", PHASES) if phase else (name, get_args(kind.model_fields[name].annotation))
        return UserError(
            f"There is no {noun} {value!r}.",
            f"{did_you_mean(value, choices)} It takes {', '.join(choices)}.".lstrip(),
        )
    expected = next((text for start, text in _KINDS.items() if kind_of_error.startswith(start)), None)
    if expected is None:
        return UserError(f"{name} is {value!r}: {first['msg']}.", "Correct the value.")
    return UserError(
        f"{name} is {value!r} in the options, which is not {expected}.", f"Set {name} to {expected}."
    )


def _check_limit(name: str, limit: float | None) -> None:
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise UserError(
            f"A time limit of {limit:g} s for {name} must be above 0.", "Give a number of seconds."
        )
