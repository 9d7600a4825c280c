"""Backends that could take a run: Kubernetes and Argo, Batch and Step Functions, Slurm.

Checks only requirements of any run; the preflight of a run checks its specific requirements.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from decorators import _metaflow
from decorators.backends.batch import preflight as batch_preflight
from decorators.backends.findings import Findings
from decorators.backends.interface import StepRequest
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.survey import survey
from estimator.errors import UserError
from estimator.hardware.cluster.api import Clock
from estimator.plan import Request
from flows.doctor.configuration import DATASTORES
from flows.doctor.line import Line
from launchers.cluster.allocation import SCONTROL_S

_REMOTE_METADATA = "Set METAFLOW_SERVICE_URL and METAFLOW_DEFAULT_METADATA=service"


def kubernetes() -> list[Line]:
    """Check Kubernetes for single-node steps, multi-node steps and Argo Workflows; include unknown checks."""
    names = ("kubernetes", "kubernetes, several nodes", "argo-workflows")
    pods = PodSettings.of(_request("kubernetes", nodes=1), gpus=False)
    try:
        detail = survey(pods)
    except UserError as error:
        return _unavailable(names, error)
    local = _local_datastore()
    return [
        line for name, findings in zip(names, detail, strict=True) for line in _lines(name, findings, local)
    ]


def batch() -> list[Line]:
    """Check AWS Batch and Step Functions."""
    names = ("batch", "batch, several nodes")
    local, configured, clock = _local_datastore(), _metaflow.configuration(), Clock()
    lines = []
    for nodes, name in enumerate(names, 1):
        request = _request("batch", nodes=nodes)
        try:
            detail = batch_preflight.inspect(
                request.request, job=batch_preflight.JobSettings.of(request), clock=clock
            )
        except UserError as error:
            return _unavailable((*names, "step-functions"), error)
        if nodes > 1 and configured.metadata == "local":
            detail.no("metadata", "local metadata, which nodes of AWS Batch cannot share", _REMOTE_METADATA)
        lines += _lines(name, detail, local)
    role = Findings(where="Step Functions")
    if not configured.step_functions_role:
        role.no(
            "role",
            "METAFLOW_SFN_IAM_ROLE is not set",
            "Set it to a role of infra/aws",
        )
    obstacles = [line for line in lines if line.check == names[0] and line.state == "no"]
    for line in obstacles:
        role.no("batch", line.found, line.fix)
    return [*lines, *_lines("step-functions", role, [])]


def slurm() -> list[Line]:
    """Check that srun is installed and Slurm's controller responds."""
    if shutil.which("srun") is None or shutil.which("scontrol") is None:
        detail, fix = (
            "srun and scontrol are not on PATH",
            "Run this on a login node (docs/slurm.md)",
        )
        return [Line(check="slurm", state="no", found=detail, fix=fix)]
    fix = "Check the controller that slurm.conf names with scontrol ping"
    try:
        done = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=SCONTROL_S, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"the controller did not respond within {SCONTROL_S:g} s"
        return [Line(check="slurm", state="no", found=detail, fix=fix)]
    output = (done.stdout or done.stderr).strip().partition("\n")[0]
    if done.returncode != 0:
        return [Line(check="slurm", state="no", found=output or "scontrol ping failed", fix=fix)]
    in_job = "SLURM_JOB_ID" in os.environ
    return [Line(check="slurm", state="ok", found=f"{output}{' (inside a job)' if in_job else ''}")]


def _request(backend: _metaflow.Backend, nodes: int) -> StepRequest:
    """Build the request of a minimal step with Metaflow's configuration."""
    request = Request(
        nodes=nodes, gpus_per_node=0, gpu_type=None, cpu=1, memory_mib=1, shared_memory_mib=0, disk_mib=0
    )
    return StepRequest(backend=backend, request=request, configured=_metaflow.configured_target(backend))


def _local_datastore() -> list[tuple[str, str]]:
    """Return (problem, fix) if pods and jobs could not reach the datastore."""
    if _metaflow.configuration().datastore != "local":
        return []
    return [("the datastore is local, which the nodes cannot reach", DATASTORES)]


def _unavailable(names: tuple[str, ...], error: UserError) -> list[Line]:
    """Return the error on the first line; further lines refer to it."""
    first = Line(check=names[0], state="no", found=error.problem, fix=error.advice)
    return [
        first,
        *(Line(check=name, state="no", found=f"see {names[0]}") for name in names[1:]),
    ]


def _lines(name: str, findings: Findings, extra: list[tuple[str, str]]) -> list[Line]:
    """Return one line on whether it works, and one per unknown check."""
    problems = [(f"{row.check}: {row.detail}", row.fix) for row in findings.impossible] + extra
    unknown = [
        Line(check=name, state="unknown", found=f"{row.check}: {row.detail}", fix=row.fix)
        for row in findings.rows
        if row.state == "unknown"
    ]
    if problems:
        fixes = dict.fromkeys(fix for _, fix in problems if fix)
        detail = "; ".join(text for text, _ in problems)
        return [Line(check=name, state="no", found=detail, fix="; ".join(fixes)), *unknown]
    passed = ", ".join(f"{row.check} {row.detail}" for row in findings.rows if row.state == "ok")
    return [Line(check=name, state="ok", found=f"{findings.where} {passed}".strip()), *unknown]
