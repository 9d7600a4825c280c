"""Launch of the checklist flow: validation of its parameters, and its resource request.

``python -m flows.cluster_check.launch`` renews the JSON Schema of its options file.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from checklist import reference
from checklist.judging import thresholds
from checklist.options import (
    CheckOptions,
    Options,
    OutputOptions,
    Text,
    build,
    flat,
    json_schema,
    measurable,
    parse_yaml,
)
from checklist.outputs import publish, taint
from checklist.outputs.publish import outputs_of
from checklist.run import local
from decorators._metaflow import Backend
from decorators.backends import cluster_name, pod_template
from decorators.backends.options import Options as Placement
from decorators.node_request import LAUNCH_VARIABLE, NodeRequest
from estimator import hardware, untrusted
from estimator.errors import UserError
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Request
from estimator.terminal import print
from launchers.base import workdir

SCHEMA_FILE = Path(__file__).with_name("options.schema.json")
RESULT_FILE = "checklist-result.json"  # result of a local run, in the current folder
REMOTE_START_S = 1200.0  # time for machines to start and pull images; local runs use the limit of Options
MAX_LAUNCH = 4000  # characters; AWS Batch takes 8192 for all variables together
_GIB = 1024  # MiB
# Per rank: torch with a CUDA context needs about 4 GiB, plus pinned buffers and those of the sweep
_CPU_OF_RANK, _MEMORY_OF_RANK_MIB, _MEMORY_OF_NODE_MIB = 4, 8 * _GIB, 8 * _GIB
_CPU_OF_PROCESS, _MEMORY_OF_PROCESS_MIB = 2, 4 * _GIB
# tens of MB per rank for NCCL, and the minimum that the shared memory check requires
_SHM_MIB, _SHM_ON_CPU_MIB = 8 * _GIB, 2 * _GIB
_DISK_MIB = 10 * _GIB
_AROUND_S = 1800.0  # time for image, code package and result on a running node


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Data of the launch that tasks need in addition to their parameters, as text."""

    backend: Backend
    gpus_per_node: int | None
    """Requested GPUs per node; None: none, or all of the local machine."""
    thresholds: str | None
    """Content of the user's thresholds file, which exists only where the run is launched."""
    thresholds_file: str
    reference: reference.Reference | None = None
    """Settings of the result file of --reference-settings, which exists only where the run is launched."""
    reference_file: str = ""

    def pack(self) -> str:
        """Serialize to a string without spaces, for an environment variable (see :meth:`unpack`)."""
        return untrusted.pack(json.dumps(asdict(self)))

    @classmethod
    def unpack(cls, text: str) -> Launch:
        try:
            return cls(**untrusted.parse_json(untrusted.unpack(text)))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{LAUNCH_VARIABLE} cannot be read: {error}.",
                "Start it again with `run`, or deploy the flow again.",
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Configuration of a run, the same for all of its tasks."""

    options: Options
    thresholds: str | None
    shares: tuple[tuple[str, ...], ...]
    """UUIDs of each node's GPUs if all nodes are on one machine."""
    local: bool
    reference: reference.Reference | None = None


class FlowOptions(OutputOptions, CheckOptions):
    """Options of the checklist flow, as flags or in the file of ``--config options``."""

    start_timeout: float | None = None
    """Seconds until all nodes must have joined. (default: 60 on this machine, 1200 on a cluster)"""
    instance_type: Text = None
    """The machine type to test, for its selector and its network."""
    queue: Text = None
    """Batch job queue, or Kueue LocalQueue."""
    pending_timeout: float = Placement().pending_timeout
    """Maximum minutes that a step waits for its nodes."""
    priority_class: Text = None
    """Kubernetes PriorityClass of the pods. (default: the lowest of the cluster)"""
    fabric: Literal["auto", "efa", "infiniband", "roce", "tcpx", "tcpxo", "none"] = "auto"
    """Network between Kubernetes nodes: auto uses what the nodes offer, none is TCP."""
    pod_template: Text = None
    """YAML file that is merged into the Kubernetes pod template, as for training."""

    @model_validator(mode="after")
    def _check_waits(self) -> FlowOptions:
        if not (math.isfinite(self.pending_timeout) and self.pending_timeout > 0):
            raise UserError(
                f"--pending-timeout {self.pending_timeout} is invalid.", "Give a number of minutes above 0."
            )
        return self


DEFAULTS = flat(FlowOptions())  # of the flow's parameters, by name


def read_options(text: str) -> dict[str, Any]:
    """Parse a YAML file of options and fill in the defaults, for the flow's parameters. Raises UserError."""
    return flat(parse_yaml(FlowOptions, text))


def options_of(values: Mapping[str, Any]) -> FlowOptions:
    """Return the options among a run's parameters. Raises UserError."""
    return build(FlowOptions, {name: values[name] for name in DEFAULTS if name in values})


def result_file(options: FlowOptions, *, local: bool) -> Path | None:
    """Return the file for a copy of the result; None if only the datastore has it."""
    if options.json is not None:
        return options.json.expanduser()
    return Path(RESULT_FILE) if local else None


def build_request(values: Mapping[str, Any], backend: Backend, gpus: int | None) -> NodeRequest:
    """Return the request of a run with these parameters, at launch; ``gpus`` are those from ``--with``.

    Raises UserError for everything that can be checked before launch.
    """
    options = options_of(values)
    outputs = outputs_of(options)
    table = _read_thresholds(options.thresholds)
    if backend == "local":
        local.split_gpus(_run_options(options))
        for line in publish.check(outputs):
            print(line, file=sys.stderr)
        _check_writable(result_file(options, local=True))
        gpus_per_node = options.gpus_per_node
    else:
        gpus_per_node = _gpus_of_node(options, gpus)
    launch = Launch(
        backend=backend,
        gpus_per_node=gpus_per_node,
        thresholds=table,
        thresholds_file=str(options.thresholds or ""),
        reference=_read_reference(options),
        reference_file=_reference_of(options),
    ).pack()
    if len(launch) > MAX_LAUNCH and backend != "local":
        raise UserError(
            f"{_files(options)} too large for a run on {backend}.",
            "Keep only the rows of this system in --thresholds, with shorter sources, or select one node of "
            "--reference-settings with --reference-node.",
        )
    return NodeRequest(
        request=_request(options, gpus_per_node),
        launch=launch,
        options=Placement(
            queue=options.queue,
            priority_class=_priority_class(options, backend),  # Kueue takes a job's priority from its pods
            pending_timeout=options.pending_timeout,
            fabric=options.fabric,
            pod_template=pod_template.read(options.pod_template) if options.pod_template else None,
            termination_grace_s=0,
        ),
        # Otherwise a node tainted by an earlier check could never be measured again and cleared
        tolerations=(Toleration(key=taint.KEY, effect=taint.EFFECT),),
        longest_s=_longest_s(options),
    )


def _longest_s(options: FlowOptions) -> float:
    """Return the maximum duration of a check: the limits of all phases, and the wait for nodes."""
    run = _run_options(options)
    limits = sum(run.limit_s(phase) for phase in run.phases)
    return (options.start_timeout or REMOTE_START_S) + limits + _AROUND_S


def read_launch() -> Launch:
    """Read the launch's data for this run's tasks. Raises UserError if there is none."""
    text = os.environ.get(LAUNCH_VARIABLE)
    if not text:
        raise UserError("This task has no launch data.", "Start it with `run`, or deploy the flow again.")
    return Launch.unpack(text)


def check_outputs(options: FlowOptions) -> tuple[str, ...]:
    """Return a line per output that does not work now. Raises UserError for outputs that never will."""
    return publish.check(outputs_of(options))


def resolve(requested: FlowOptions, launch: Launch, *, datastore: str) -> RunConfig:
    """Decide the configuration in the first task. Raises UserError for what a deployment cannot do."""
    options = _run_options(requested, datastore=datastore if measurable(datastore) else None)
    if str(requested.thresholds or "") != launch.thresholds_file:
        raise UserError(
            f"This deployment was made with --thresholds {launch.thresholds_file or '(none)'}.",
            "Deploy the flow again: its tasks cannot read files of another machine.",
        )
    if _reference_of(requested) != launch.reference_file:
        raise UserError(
            f"This deployment was made with --reference-settings {launch.reference_file or '(none)'}.",
            "Deploy the flow again: its tasks cannot read files of another machine.",
        )
    if launch.backend == "local":
        options, uuids = local.split_gpus(options)
        return RunConfig(
            options=options,
            thresholds=launch.thresholds,
            shares=tuple(uuids),
            local=True,
            reference=launch.reference,
        )
    if options.gpus_per_node not in (None, launch.gpus_per_node) and options.device != "cpu":
        raise UserError(
            f"This deployment requests {launch.gpus_per_node} GPUs per node, not {options.gpus_per_node}.",
            "Deploy the flow again with that number: a deployment's resources are fixed.",
        )
    on_gpus = launch.gpus_per_node is not None
    options = options.model_copy(
        update={
            "gpus_per_node": launch.gpus_per_node or options.gpus_per_node or 1,
            "device": "cuda" if on_gpus else "cpu",  # so that a node without GPUs does not pass as a CPU test
            "start_timeout": options.start_timeout or REMOTE_START_S,
        }
    )
    shares: tuple[tuple[str, ...], ...] = ((),) * options.nodes
    return RunConfig(
        options=options, thresholds=launch.thresholds, shares=shares, local=False, reference=launch.reference
    )


def _run_options(options: FlowOptions, datastore: str | None = None) -> Options:
    """Return the options of a node. Thresholds and settings of a file travel as text with the launch."""
    return options.options(
        start_timeout=options.start_timeout,
        directory=workdir.place(),  # each node has a separate root in it
        datastore=datastore,
        thresholds=None,
    ).of_nodes()


def table_of(text: str | None) -> thresholds.Table:
    """Return the shipped thresholds, overridden by the user's table, given as text."""
    if text is None:
        return thresholds.table()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "thresholds.csv"
        file.write_text(text, encoding="utf-8")
        return thresholds.table(file)


def _read_thresholds(file: Path | None) -> str | None:
    if file is None:
        return None
    file = file.expanduser()
    thresholds.read(file, user=True)  # raises for the first error
    return file.read_text(encoding="utf-8-sig")


def _read_reference(options: FlowOptions) -> reference.Reference | None:
    file = options.reference_settings
    return None if file is None else reference.read(file, options.reference_node)


def _reference_of(options: FlowOptions) -> str:
    """Return the file and node of --reference-settings; empty if not given."""
    if options.reference_settings is None:
        return ""
    return " of ".join(filter(None, (str(options.reference_settings), options.reference_node)))


def _files(options: FlowOptions) -> str:
    file_options = (
        ("--thresholds", options.thresholds),
        ("--reference-settings", options.reference_settings),
    )
    texts = [f"{flag} {file}" for flag, file in file_options if file is not None]
    return f"{' and '.join(texts)} {'are' if len(texts) > 1 else 'is'}"


def _check_writable(file: Path | None) -> None:
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise UserError(f"{file} cannot be written.", "Give --json a file in an existing folder.")


def _gpus_of_node(options: FlowOptions, detected: int | None) -> int | None:
    """Return the GPUs to request per node of a cluster; None if the checks run on CPUs."""
    if options.device == "cpu":
        return None
    requested = options.gpus_per_node
    if requested and detected and requested != detected:
        raise UserError(
            f"--gpus-per-node {requested} and gpu={detected} contradict each other.",
            "Give the number of GPUs per node once.",
        )
    if options.instance_type and not (requested or detected):
        detected = hardware.instance(options.instance_type).gpu_count or None
    if requested or detected:
        return requested or detected
    if options.device == "cuda":
        raise UserError("The number of GPUs per node is unknown.", "Give it, for example --gpus-per-node 8.")
    sys.stderr.write("No GPUs are requested, so CPUs are checked; --gpus-per-node 8 requests 8 per node.\n")
    return None


def _request(options: FlowOptions, gpus: int | None) -> Request:
    processes = gpus or options.gpus_per_node or 1
    kind = options.instance_type
    instance = hardware.current().find_instance(kind) if kind else None
    if gpus:
        cpu, memory = _CPU_OF_RANK * gpus, _MEMORY_OF_NODE_MIB + _MEMORY_OF_RANK_MIB * gpus
    else:
        cpu, memory = _CPU_OF_PROCESS * processes, _MEMORY_OF_PROCESS_MIB * processes
    return Request(
        nodes=options.nodes,
        gpus_per_node=gpus or 0,
        gpu_type=instance.gpu if instance is not None and gpus else None,
        cpu=cpu,
        memory_mib=memory,
        shared_memory_mib=_SHM_MIB if gpus else _SHM_ON_CPU_MIB,
        disk_mib=_DISK_MIB,
        instance_type=kind,
    )


def _priority_class(options: FlowOptions, backend: Backend) -> str | None:
    """Return the lowest PriorityClass of the cluster, so that any other pod can preempt the checks."""
    if backend != "kubernetes":
        return None
    return options.priority_class or cluster_name.lowest_priority_class()


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(json_schema(FlowOptions), indent=1) + "\n")
