"""All outputs that a run was asked for, in one place: whatever fails, the measured result stays.

How a run uses it: make :class:`Outputs` (it refuses what can't be), call :func:`check` before anything is
measured and show its lines, measure, *keep the result first* (result.json, an artifact), then call
:func:`publish` and show its lines. The run's exit status is the verdict's: an output that fails does not
change it, so that nobody takes a webhook that is down for a cluster that is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from checklist.options import MOST_SHARE, OutputOptions
from checklist.outputs import cloudwatch, prometheus, taint, webhook
from checklist.result import Result
from estimator.errors import UserError
from estimator.hardware import cluster_api

STANDARD_OUTPUT = "-"
Output = Literal["prometheus", "cloudwatch", "nodes", "webhook"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where a result goes besides result.json. Raises UserError for values that can't be."""

    webhook: bool = False
    """Post to the address in $CHECKLIST_WEBHOOK_URL, which is read when it is needed and never shown."""
    prometheus: Path | None = None
    """A textfile for node_exporter; its name ends in .prom."""
    cloudwatch: str | None = None
    """A file that the line is appended to; "-" is standard output."""
    mark: taint.How | None = None
    """How nodes of a Kubernetes cluster are marked; None: they are not."""
    apply: bool = False
    """Mark them; otherwise it is only said what would be done."""
    most_share: float = MOST_SHARE
    """Of the cluster's nodes that may be marked in all."""
    context: str | None = None
    """Of the kubeconfig; None: the current one, or the cluster that this pod runs in."""
    cluster: str = "default"
    """What messages and metrics call this cluster."""

    def __post_init__(self) -> None:
        taint.check_share(self.most_share)
        if not self.cluster.strip():
            raise UserError("The cluster's name is empty.", "Give it one, or leave it out.")
        if self.mark is None and (self.apply or self.context is not None):
            name = "--apply" if self.apply else "--context"
            raise UserError(
                f"{name} is about marking nodes, which is not asked for.", "Add --taint or --label."
            )


def outputs_of(options: OutputOptions, *, cluster: str = "default", context: str | None = None) -> Outputs:
    """Where the result goes, as options say it. Raises UserError for values that can't be."""
    return Outputs(
        webhook=options.webhook,
        prometheus=options.prometheus,
        cloudwatch=options.cloudwatch,
        mark="taint" if options.taint else "label" if options.label else None,
        apply=options.apply,
        most_share=options.most_share,
        context=context,
        cluster=cluster,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of one output."""

    output: Output
    failed: bool
    lines: tuple[str, ...]
    """For people: what was done, or why it failed; never an address of a webhook."""


def check(outputs: Outputs) -> tuple[str, ...]:
    """Before the run: refuse what will never work, and say in a line each what does not work now.

    To be called where the outputs will be made. Raises UserError for a missing library, folder, kubeconfig
    or webhook address. A cluster or webhook that is down and marks that are not allowed are lines only: the
    measurement is worth more, and they may be mended by its end.
    """
    if outputs.prometheus is not None:
        prometheus.check(outputs.prometheus)
        _check_folder("--prometheus", outputs.prometheus)
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
            f"{option} {file} can't be written.",
            "Name a file in a folder that there is and that may be written to.",
        )


def _check_nodes(outputs: Outputs) -> str | None:
    taint.check_installed()
    cluster_api.access(outputs.context)
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
            f"--webhook: ${webhook.URL_VARIABLE} is no http(s) address.", "It begins with https://."
        )
    return webhook.out_of_reach(url)


def publish(result: Result, outputs: Outputs) -> tuple[Report, ...]:
    """Hand the result to every output that was asked for. Never raises; each that fails is a line.

    Returns within the outputs' own limits of time. The result must have been kept before.
    """
    title = "Checklist" if outputs.cluster == Outputs().cluster else f"Checklist of {outputs.cluster}"
    todo: list[tuple[Output, Callable[[], tuple[str, ...]]]] = []
    if outputs.prometheus is not None:
        todo.append(("prometheus", partial(_prometheus, result, outputs.prometheus, outputs.cluster)))
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
    """What goes wrong, in one line; None where nothing does."""
    try:
        call()
    except taint.NotAllMarkedError:  # has more than one line to tell
        raise
    except UserError as error:
        return " ".join(f"{error.problem} {error.advice}".split())
    except Exception as error:  # noqa: BLE001 - a fault of an output's must not cost the result
        return f"Unexpected {type(error).__name__}."  # its text might quote the webhook's address
    return None


def _prometheus(result: Result, file: Path, cluster: str) -> tuple[str, ...]:
    prometheus.write(result, file, cluster)
    return (f"Written for Prometheus: {file}",)


def _cloudwatch(result: Result, where: str, cluster: str) -> tuple[str, ...]:
    if where == STANDARD_OUTPUT:
        cloudwatch.write(result, sys.stdout, cluster=cluster)
        return ()
    try:
        with Path(where).open("a") as stream:
            cloudwatch.write(result, stream, cluster=cluster)
    except OSError as error:
        raise UserError(
            f"The line for CloudWatch can't be written to {where}: {error.strerror or error}.",
            "Name a file that may be written to.",
        ) from None
    return (f"Written for CloudWatch: {where}",)


def _nodes(result: Result, outputs: Outputs, how: taint.How) -> tuple[str, ...]:
    return taint.publish(
        result, apply=outputs.apply, how=how, most_share=outputs.most_share, context=outputs.context
    )


def _webhook(result: Result, title: str) -> tuple[str, ...]:
    problem = webhook.send(result, os.environ.get(webhook.URL_VARIABLE, ""), title=title)
    if problem is not None:
        raise UserError(problem)
    return ("The webhook was called.",)
