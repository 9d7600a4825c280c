"""From the checklist flow's parameters to what is checked, asked for and told; what a run is refused for."""

from __future__ import annotations

import base64
import difflib
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from checklist.judges import thresholds
from checklist.measurements import PHASES
from checklist.options import Options, measurable, names
from checklist.outputs import publish, taint
from checklist.outputs.publish import Outputs
from checklist.run import local
from decorators._metaflow import Backend
from decorators.backends import cluster_name
from decorators.backends.options import Options as Placement
from decorators.node_request import LAUNCH_VARIABLE, PRIORITY_VARIABLE, Asked
from estimator import hardware
from estimator.errors import UserError
from estimator.plan import Request
from launchers import workdir

DEFAULTS: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": None,
    "profile": "quick",
    "only": "",
    "skip": "",
    "device": "auto",
    "timeout": None,
    "op_timeout": None,
    "start_timeout": None,
    "thresholds": "",
    "system": "",
    "json": "",
    "instance_type": "",
    "queue": "",
    "pending_timeout": Placement().pending_timeout,
    "priority_class": "",
    "webhook": False,
    "prometheus": "",
    "cloudwatch": "",
    "taint": False,
    "label": False,
    "apply": False,
    "most_share": taint.MOST_SHARE,
}
_NUMBERS = (
    "nodes",
    "gpus_per_node",
    "timeout",
    "op_timeout",
    "start_timeout",
    "pending_timeout",
    "most_share",
)
RESULT_FILE = "checklist-result.json"  # of a run on this machine, in the folder that it is started from
REMOTE_START_S = 1200.0  # for machines and images to come; on this machine Options' own limit holds
MOST_LAUNCH = 4000  # characters; AWS Batch takes 8192 for all variables together
_GIB = 1024  # MiB
# Of a rank's process: torch with a CUDA context is some 4 GiB; pinned buffers and the sweep's come on top
_CPU_OF_RANK, _MEMORY_OF_RANK_MIB, _MEMORY_OF_NODE_MIB = 4, 8 * _GIB, 8 * _GIB
_CPU_OF_PROCESS, _MEMORY_OF_PROCESS_MIB = 2, 4 * _GIB
_SHM_MIB, _SHM_ON_CPU_MIB = 8 * _GIB, 2 * _GIB  # NCCL's tens of MB for each rank, and what the check wants
_DISK_MIB = 10 * _GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What tasks must know of the launch beyond their parameters. Text both ways."""

    backend: Backend
    gpus_per_node: int | None
    """That the nodes have been asked for; None: none, or (here) all."""
    thresholds: str | None
    """The user's table; its file stays where the run is launched."""
    thresholds_file: str

    def pack(self) -> str:
        """As one word."""
        return base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode(), 9)).decode()

    @classmethod
    def unpack(cls, text: str) -> Launch:
        return cls(**json.loads(zlib.decompress(base64.b64decode(text))))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What a run does, the same for all of its tasks."""

    options: Options
    thresholds: str | None
    shares: tuple[tuple[str, ...], ...]
    """By node: UUIDs of the GPUs that are its own, where all nodes are on one machine."""
    local: bool


def read_options(text: str) -> dict[str, Any]:
    """A YAML file of options over the defaults. Raises UserError."""
    try:
        given = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(
            f"The options are no YAML: {' '.join(str(error).split())}", "Mend the file."
        ) from None
    if not isinstance(given, dict):
        raise UserError("The options are no mapping.", "Write lines such as `nodes: 4`.")
    for name in given:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(str(name), DEFAULTS, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UserError(f"There is no option {name!r}.", f"{hint}It takes {', '.join(DEFAULTS)}.")
    return {**DEFAULTS, **{name: _of_kind(name, value) for name, value in given.items()}}


def _of_kind(name: str, value: Any) -> Any:
    """An option of the file as its flag takes it. Raises UserError."""
    if name in ("only", "skip") and isinstance(value, list):
        return ",".join(map(str, value))
    if value is None:
        return DEFAULTS[name]
    if isinstance(DEFAULTS[name], bool):
        kind, fits = "true or false", isinstance(value, bool)
    elif name in _NUMBERS:
        whole = name in ("nodes", "gpus_per_node")
        kind = "a whole number" if whole else "a number"
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    else:
        kind, fits = "text", isinstance(value, str)
    if not fits:
        raise UserError(f"{name} is {value!r} in the options, which is not {kind}.", "Mend that line.")
    return value


def options_from(values: Mapping[str, Any]) -> Options:
    """What is checked. Raises UserError."""
    limit, start = values.get("timeout"), values.get("start_timeout")
    return Options(
        profile=values["profile"],
        nodes=values["nodes"],
        gpus_per_node=values.get("gpus_per_node"),
        device=values["device"],
        only=names(values.get("only") or ""),
        skip=names(values.get("skip") or ""),
        time_limits_s=dict.fromkeys(PHASES, limit) if limit is not None else {},
        op_limit_s=values.get("op_timeout"),
        system=values.get("system") or None,
        **({"start_limit_s": start} if start is not None else {}),
    )


def outputs_from(values: Mapping[str, Any], cluster: str = "default") -> Outputs:
    """Where the result goes besides. Raises UserError."""
    if values.get("taint") and values.get("label"):
        raise UserError("--taint and --label are two ways to mark a node.", "Give one of them.")
    return Outputs(
        webhook=bool(values.get("webhook")),
        prometheus=Path(values["prometheus"]) if values.get("prometheus") else None,
        cloudwatch=values.get("cloudwatch") or None,
        mark="taint" if values.get("taint") else "label" if values.get("label") else None,
        apply=bool(values.get("apply")),
        most_share=values["most_share"],
        cluster=cluster,
    )


def result_file(values: Mapping[str, Any], *, here: bool) -> Path | None:
    """Where a copy of the result is written; None: nowhere but the datastore."""
    if values.get("json"):
        return Path(values["json"]).expanduser()
    return Path(RESULT_FILE) if here else None


def ask(values: Mapping[str, Any], backend: Backend, gpus: int | None) -> Asked:
    """What a run with those parameters asks for, where it is launched; ``gpus`` are those behind ``--with``.

    Raises UserError for all that can be known to be wrong before anything is launched.
    """
    options = options_from(values)
    outputs_from(values)
    text = _read_thresholds(values.get("thresholds") or "")
    if backend == "local":
        local.shared_out(options)
        for line in check_outputs(values):
            sys.stderr.write(line + "\n")
        _check_writable(result_file(values, here=True))
        wanted = options.gpus_per_node
    else:
        wanted = _gpus_of_node(values, options, gpus)
    launch = Launch(
        backend=backend,
        gpus_per_node=wanted,
        thresholds=text,
        thresholds_file=values.get("thresholds") or "",
    ).pack()
    if len(launch) > MOST_LAUNCH and backend != "local":
        raise UserError(
            f"--thresholds {values['thresholds']} is too large to travel with a run on {backend}.",
            "Leave only the rows of this system in it, with shorter sources.",
        )
    wait = values["pending_timeout"]
    if not (math.isfinite(wait) and wait > 0):
        raise UserError(f"--pending-timeout {wait} is not possible.", "Give minutes above 0.")
    return Asked(
        request=_request(values, options, wanted),
        launch=launch,
        priority_class=_priority_class(values, backend),  # Kueue takes a job's priority from its pods
        options=Placement(queue=values.get("queue") or None, pending_timeout=wait),
    )


def read_launch() -> Launch:
    """What the launch has left for this run's tasks. Raises UserError where there was none."""
    text = os.environ.get(LAUNCH_VARIABLE)
    if not text:
        raise UserError(
            "This run has not been launched as one.", "Start it with `run`, or deploy the flow anew."
        )
    return Launch.unpack(text)


def check_outputs(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each output that does not work now. Raises UserError for those that never will."""
    return publish.check(outputs_from(values))


def resolve(values: Mapping[str, Any], launch: Launch, *, datastore: str) -> RunConfig:
    """What the run does, in its first task. Raises UserError where a deployed flow can't do what is asked."""
    options = replace(
        options_from(values),
        work_directory=workdir.root(),
        datastore=datastore if measurable(datastore) else None,
    )
    if values.get("thresholds", "") != launch.thresholds_file:
        raise UserError(
            f"This deployment was made with --thresholds {launch.thresholds_file or '(none)'}.",
            "Deploy the flow anew: its tasks can't read files of another machine.",
        )
    if launch.backend == "local":
        options, shares = local.shared_out(options)
        return RunConfig(options=options, thresholds=launch.thresholds, shares=tuple(shares), local=True)
    if options.gpus_per_node not in (None, launch.gpus_per_node) and options.device != "cpu":
        raise UserError(
            f"This deployment asks for {launch.gpus_per_node} GPUs a node, not {options.gpus_per_node}.",
            "Deploy the flow anew with that number: a deployment's resources are fixed.",
        )
    on_gpus = launch.gpus_per_node is not None
    options = replace(
        options,
        gpus_per_node=launch.gpus_per_node or options.gpus_per_node or 1,
        device="cuda" if on_gpus else "cpu",  # so that a node without its GPUs is no CPU test that passes
        start_limit_s=values.get("start_timeout") or REMOTE_START_S,
    )
    return RunConfig(options=options, thresholds=launch.thresholds, shares=((),) * options.nodes, local=False)


def table_of(text: str | None) -> thresholds.Table:
    """The shipped thresholds, and above them the user's, given as text."""
    if text is None:
        return thresholds.table()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "thresholds.csv"
        file.write_text(text, encoding="utf-8")
        return thresholds.table(file)


def _read_thresholds(name: str) -> str | None:
    if not name:
        return None
    file = Path(name).expanduser()
    thresholds.read(file, own=True)  # raises for the first mistake in it
    return file.read_text(encoding="utf-8-sig")


def _check_writable(file: Path | None) -> None:
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise UserError(f"{file} can't be written.", "Give --json a file in a folder that exists.")


def _gpus_of_node(values: Mapping[str, Any], options: Options, given: int | None) -> int | None:
    """GPUs to ask for on each node of a cluster; None: the checks run on CPUs."""
    if options.device == "cpu":
        return None
    asked = options.gpus_per_node
    if asked and given and asked != given:
        raise UserError(
            f"--gpus-per-node {asked} and gpu={given} contradict each other.",
            "Give the number of GPUs for each node once.",
        )
    if values.get("instance_type") and not (asked or given):
        given = hardware.instance(values["instance_type"]).gpu_count or None
    if asked or given:
        return asked or given
    if options.device == "cuda":
        raise UserError(
            "How many GPUs a node has can't be known from here.", "Add it, for example --gpus-per-node 8."
        )
    sys.stderr.write(
        "No GPUs are asked for, so CPUs are checked; --gpus-per-node 8 asks for 8 of each node.\n"
    )
    return None


def _request(values: Mapping[str, Any], options: Options, gpus: int | None) -> Request:
    processes = gpus or options.gpus_per_node or 1
    kind = values.get("instance_type") or None
    instance = hardware.current().find_instance(kind) if kind else None
    if gpus:
        cpu, memory = _CPU_OF_RANK * gpus, _MEMORY_OF_NODE_MIB + _MEMORY_OF_RANK_MIB * gpus
    else:
        cpu, memory = _CPU_OF_PROCESS * processes, _MEMORY_OF_PROCESS_MIB * processes
    return Request(
        nodes=options.nodes,
        gpus_per_node=gpus or 0,
        gpu=instance.gpu if instance is not None and gpus else None,
        cpu=cpu,
        memory_mib=memory,
        shared_memory_mib=_SHM_MIB if gpus else _SHM_ON_CPU_MIB,
        disk_mib=_DISK_MIB,
        instance_type=kind,
    )


def _priority_class(values: Mapping[str, Any], backend: Backend) -> str | None:
    """As low as the cluster has one, so that the checks give way to everything."""
    if backend != "kubernetes":
        return None
    given = values.get("priority_class") or os.environ.get(PRIORITY_VARIABLE)
    return given or cluster_name.lowest_priority_class()
