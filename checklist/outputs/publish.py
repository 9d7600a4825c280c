"""Dispatch of a result to all requested outputs; a failing output never loses the measured result.

Usage: create :class:`Outputs` (it rejects invalid values), call :func:`check` before measuring and show its
lines, measure, *store the result first* (result.json, an artifact), then call :func:`publish` and show its
lines. The exit status depends on the verdict only, so that a webhook outage is never mistaken for a cluster
fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from checklist.options import MAX_SHARE, OutputOptions
from checklist.outputs import cloudwatch, prometheus, taint, webhook
from checklist.result import Result
from estimator.errors import UserError
from estimator.hardware.cluster import api

STANDARD_OUTPUT = "-"
Output = Literal["prometheus", "pushgateway", "cloudwatch", "nodes", "webhook"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Outputs of a result besides result.json. Raises UserError for invalid values."""

    webhook: bool = False
    """Post to the address in $CHECKLIST_WEBHOOK_URL, which is read when needed and never shown."""
    prometheus: Path | None = None
    """Textfile for node_exporter; its name ends in .prom."""
    pushgateway: str | None = None
    """Address of a Prometheus Pushgateway."""
    cloudwatch: str | None = None
    """File to append the line to; "-" for standard output."""
    mark: taint.MarkKind | None = None
    """How to mark nodes of a Kubernetes cluster; None: do not mark them."""
    apply: bool = False
    """Mark the nodes; otherwise only print the intended changes."""
    most_share: float = MAX_SHARE
    """Maximum share of the cluster's nodes that may be marked in total."""
    context: str | None = None
    """Context of the kubeconfig; None: the current one, or the cluster of this pod."""
    cluster: str = "default"
    """Name of this cluster in messages and metrics."""

    def __post_init__(self) -> None:
        taint.check_share(self.most_share)
        if not self.cluster.strip():
            raise UserError("The cluster's name is empty.", "Give it one, or leave it out.")
        if self.mark is None and (self.apply or self.context is not None):
            name = "--apply" if self.apply else "--context"
            raise UserError(
                f"{name} applies to marks on nodes, and none is requested.", "Add --taint or --label."
            )


def outputs_of(options: OutputOptions, *, cluster: str = "default", context: str | None = None) -> Outputs:
    """Build the outputs from the options. Raises UserError for invalid values."""
    return Outputs(
        webhook=options.webhook,
        prometheus=options.prometheus,
        pushgateway=options.pushgateway,
        cloudwatch=options.cloudwatch,
        mark="taint" if options.taint else "label" if options.label else None,
        apply=options.apply,
        most_share=options.most_share,
        context=context,
        cluster=cluster,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Outcome of one output."""

    output: Output
    failed: bool
    lines: tuple[str, ...]
    """Messages for users: what was done, or why it failed; never the address of a webhook."""


def check(outputs: Outputs) -> tuple[str, ...]:
    """Validate outputs before the run: reject permanent problems, return a line for each temporary one.

    Call it on the host that will write the outputs. Raises UserError for a missing library, folder,
    kubeconfig or webhook address. A cluster or webhook that is down, or missing permission to mark nodes,
    gives lines only: the measurement is more important, and the problem may be fixed by its end.
    """
    if outputs.prometheus is not None:
        prometheus.check(outputs.prometheus)
        _check_folder("--prometheus", outputs.prometheus)
    if outputs.pushgateway is not None:
        prometheus.check_gateway(outputs.pushgateway)
    if outputs.cloudwatch not in (None, STANDARD_OUTPUT):
        _check_folder("--cloudwatch", Path(outputs.cloudwatch or ""))
    problems = [
        _check_nodes(outputs) if outputs.mark else None,
        _check_webhook() if outputs.webhook else None,
    ]
    return tuple(problem for problem in problems if problem is not None)


def _check_folder(option: str, file: Path) -> None:
    if not os.access(file.absolute().parent, os.W_OK):
        raise UserError(
            f"{option} {file} cannot be written.",
            "Name a file in an existing folder with write permission.",
        )


def _check_nodes(outputs: Outputs) -> str | None:
    taint.check_installed()
    api.access(outputs.context)
    problem = _problem(lambda: taint.check(outputs.context, apply=outputs.apply))
    return f"Nodes could not be marked now. {problem}" if problem else None


def _check_webhook() -> str | None:
    url = os.environ.get(webhook.URL_VARIABLE)
    if not url:
        raise UserError(
            f"--webhook: ${webhook.URL_VARIABLE} is not set.",
            f"Put the webhook's address there: export {webhook.URL_VARIABLE}=https://...",
        )
    if not webhook.is_address(url):
        raise UserError(
            f"--webhook: ${webhook.URL_VARIABLE} is not an http(s) address.",
            "Set it to an address that starts with https://.",
        )
    return webhook.unreachable_reason(url)


def publish(result: Result, outputs: Outputs) -> tuple[Report, ...]:
    """Write the result to every requested output. Never raises; each failure becomes a line.

    Returns within the outputs' time limits. The result must be stored before.
    """
    title = "Checklist" if outputs.cluster == Outputs().cluster else f"Checklist of {outputs.cluster}"
    todo: list[tuple[Output, Callable[[], tuple[str, ...]]]] = []
    if outputs.prometheus is not None:
        todo.append(("prometheus", partial(_prometheus, result, outputs.prometheus, outputs.cluster)))
    if outputs.pushgateway is not None:
        todo.append(("pushgateway", partial(_pushgateway, result, outputs.pushgateway, outputs.cluster)))
    if outputs.cloudwatch is not None:
        todo.append(("cloudwatch", partial(_cloudwatch, result, outputs.cloudwatch, outputs.cluster)))
    if outputs.mark is not None:
        todo.append(("nodes", partial(_nodes, result, outputs, outputs.mark)))
    if outputs.webhook:
        todo.append(("webhook", partial(_webhook, result, title)))
    return tuple(_report(output, call) for output, call in todo)


def _report(output: Output, call: Callable[[], tuple[str, ...]]) -> Report:
    done: list[tuple[str, ...]] = []
    try:
        problem = _problem(lambda: done.append(call()))
    except taint.NotAllMarkedError as error:
        return Report(output=output, failed=True, lines=error.lines)
    return Report(output=output, failed=problem is not None, lines=(problem,) if problem else done[0])


def _problem(call: Callable[[], object]) -> str | None:
    """Run an output and return its failure as one line; None on success."""
    try:
        call()
    except taint.NotAllMarkedError:  # has more than one line
        raise
    except UserError as error:
        return " ".join(f"{error.problem} {error.advice}".split())
    except Exception as error:  # noqa: BLE001 - a failing output must not lose the result
        return f"Unexpected {type(error).__name__}."  # its text may contain the webhook's address
    return None


def _prometheus(result: Result, file: Path, cluster: str) -> tuple[str, ...]:
    prometheus.write(result, file, cluster)
    return (f"Written for Prometheus: {file}",)


def _pushgateway(result: Result, gateway: str, cluster: str) -> tuple[str, ...]:
    prometheus.push(result, gateway, cluster)
    return (f"Sent to the Pushgateway: {gateway}",)


def _cloudwatch(result: Result, where: str, cluster: str) -> tuple[str, ...]:
    if where == STANDARD_OUTPUT:
        cloudwatch.write(result, sys.stdout, cluster=cluster)
        return ()
    try:
        with Path(where).open("a") as stream:
            cloudwatch.write(result, stream, cluster=cluster)
    except OSError as error:
        raise UserError(
            f"The line for CloudWatch cannot be written to {where}: {error.strerror or error}.",
            "Name a file that may be written to.",
        ) from None
    return (f"Written for CloudWatch: {where}",)


def _nodes(result: Result, outputs: Outputs, method: taint.MarkKind) -> tuple[str, ...]:
    return taint.publish(
        result, apply=outputs.apply, method=method, most_share=outputs.most_share, context=outputs.context
    )


def _webhook(result: Result, title: str) -> tuple[str, ...]:
    problem = webhook.send(result, os.environ.get(webhook.URL_VARIABLE, ""), title=title)
    if problem is not None:
        raise UserError(problem)
    return ("The webhook was called.",)
