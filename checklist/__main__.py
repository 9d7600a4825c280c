"""``python -m checklist`` (two local nodes), or the same under torchrun or srun (one process for each rank).

Exit status: 0 pass or warn, 1 fail, 2 could not run, 3 no verdict, 130 ended by Ctrl-C. An output that fails
after the run is told on standard error and does not change it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checklist.measurements import PHASES
from checklist.options import Options, names
from checklist.outputs.taint import MOST_SHARE
from checklist.run.rendezvous import NO_SECRET, Rendezvous, from_environment
from estimator.errors import UserError

if TYPE_CHECKING:
    from checklist.measurements import Measurements
    from checklist.outputs.publish import Outputs
    from checklist.past_runs import History
    from checklist.result import Result

COULD_NOT_RUN = 2
INTERRUPTED = 128 + signal.SIGINT  # as shells say it; typer would end with 1, which is FAIL here
NODE_NAME = "NODE_NAME"  # where a pod's downward API puts the node's name; the probes read it

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def checklist(
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that there should be. (default: the launcher's, else 2 local)")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node. (default: all its GPUs; 1 on CPUs)")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, standard or deep.")] = "quick",
    only: Annotated[list[str] | None, typer.Option(help="Checks to do, with commas.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Checks to leave out, with commas.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for each phase. (default: the profile's)")
    ] = None,
    op_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which one operation counts as hung.")
    ] = None,
    thresholds: Annotated[
        Path | None, typer.Option(help="Your own table of thresholds, above the shipped one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the thresholds call this system.")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Work folder to measure. (default: the one for temporary files)")
    ] = None,
    datastore: Annotated[
        str | None, typer.Option(help="Store to measure: a folder of every node, or s3://bucket/prefix.")
    ] = None,
    node_name: Annotated[  # torchrun would take a mere --node for its own --node-rank
        str | None,
        typer.Option(help="What the cluster calls this host. (default: $NODE_NAME, the instance, the host)"),
    ] = None,
    cluster: Annotated[str, typer.Option(help="What messages and metrics call this cluster.")] = "default",
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder in which logs and journals are kept.")] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Earlier runs, to compare with and to add this one to: a file, or a folder."),
    ] = None,
    webhook: Annotated[
        bool, typer.Option("--webhook", help="Post the result to the address in $CHECKLIST_WEBHOOK_URL.")
    ] = False,
    prometheus: Annotated[
        Path | None, typer.Option(help="A textfile for node_exporter; it ends in .prom.")
    ] = None,
    cloudwatch: Annotated[
        str | None, typer.Option(help="A file to add a line of embedded metrics to; - prints it.")
    ] = None,
    taint: Annotated[bool, typer.Option("--taint", help="Taint bad nodes in Kubernetes.")] = False,
    label: Annotated[
        bool, typer.Option("--label", help="Label nodes as fit or unfit in Kubernetes.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do that; otherwise it is only said what would be done.")
    ] = False,
    most_share: Annotated[
        float, typer.Option(help="Share of the nodes that may be marked in all.")
    ] = MOST_SHARE,
    context: Annotated[str | None, typer.Option(help="Of the kubeconfig. (default: the current)")] = None,
) -> None:
    """Is this cluster fit to train on, and if not, which node, link, direction or GPU is at fault?"""
    from checklist.outputs.publish import Outputs

    try:
        place = from_environment()
        leads = place is None or place.leads
        if place is not None and leads and not place.secret:
            _say(NO_SECRET)
        options = Options(
            profile=profile,  # type: ignore[arg-type]
            nodes=nodes if nodes is not None else place.nodes if place else 2,
            gpus_per_node=gpus_per_node,
            device=device,  # type: ignore[arg-type]
            only=names(only or ()),
            skip=names(skip or ()),
            time_limits_s=dict.fromkeys(PHASES, timeout) if timeout is not None else {},
            op_limit_s=op_timeout,
            thresholds=thresholds,
            system=system,
            work_directory=directory,
            datastore=datastore,
        )
        if taint and label:
            raise UserError("--taint and --label exclude each other.", "Choose one way of marking nodes.")
        outputs = Outputs(
            webhook=webhook,
            prometheus=prometheus,
            cloudwatch=cloudwatch,
            mark="taint" if taint else "label" if label else None,
            apply=apply,
            most_share=most_share,
            context=context,
            cluster=cluster,
        )
        conclude = _Conclude(options, _before(outputs, json, history)) if leads else None
        status = _measure(options, place, keep, node_name, conclude)
    except UserError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None
    except KeyboardInterrupt:
        _say("Ended by Ctrl-C, without a verdict.")
        raise typer.Exit(INTERRUPTED) from None
    if conclude is not None:
        _after(conclude.result, outputs, json, history)
    raise typer.Exit(status)


class _Conclude:
    """Judges, where rank 0 is: nobody else knows the past. Raises UserError for unreadable thresholds."""

    result: Result

    def __init__(self, options: Options, past: History) -> None:
        from checklist.judges.thresholds import table

        self._options, self._past, self._table = options, past, table(options.thresholds)

    def __call__(self, measured: Measurements) -> int:
        """The exit status."""
        from checklist.verdict import judge

        result = judge(
            measured,
            checks=self._options.checks,
            thresholds=self._table,
            history=self._past.records,
            open_failures=self._past.open_failures,
            system=self._options.system,
        )
        self.result = replace(result, notes=(*result.notes, *self._past.problems))
        return result.exit_code


def _before(outputs: Outputs, json: Path | None, history: Path | None) -> History:
    """What can be wrong with files and outputs is found before the run. Raises UserError."""
    from checklist import past_runs
    from checklist.outputs.publish import check

    if json is not None and (json.is_dir() or not os.access(json.absolute().parent, os.W_OK)):
        raise UserError(f"{json} can't be written.", "Give --json a file in a folder that exists.")
    past = past_runs.History()
    if history is not None:
        past_runs.check_place(history)
        past = past_runs.read(history)
    _say(*check(outputs), *past.problems)
    return past


def _measure(
    options: Options,
    place: Rendezvous | None,
    keep: Path | None,
    node_name: str | None,
    conclude: _Conclude | None,
) -> int:
    """The exit status, rank 0's on every rank."""
    if place is None:
        from checklist.run.local import run_local

        if node_name is not None:
            raise UserError(
                "--node-name names one host, and all nodes of this run are local.",
                "Leave it out, or use a launcher.",
            )
        measured = run_local(options, directory=keep)
        return COULD_NOT_RUN if conclude is None else conclude(measured)
    from checklist.run.supervisor import take_part

    if node_name is not None:
        os.environ[NODE_NAME] = node_name
    end = take_part(_with_gpus(options, place), place, directory=keep, conclude=conclude)
    return COULD_NOT_RUN if end.status is None else end.status


def _with_gpus(options: Options, place: Rendezvous) -> Options:
    """What each node was asked for: the option, else what the launcher has started."""
    started = max(1, place.world // place.nodes)
    return options if options.gpus_per_node is not None else replace(options, gpus_per_node=started)


def _after(result: Result, outputs: Outputs, json: Path | None, history: Path | None) -> None:
    """Keep the result first, then hand it on; whatever fails is a line on standard error."""
    from checklist import past_runs
    from checklist.outputs.publish import publish
    from checklist.outputs.terminal import show

    if json is not None:
        _keep(result, json)
    if history is not None:
        try:
            past_runs.keep(result, history)
        except UserError as error:
            _say(error.problem)
    reports = publish(result, outputs)
    show(result)
    for item in reports:
        for line in item.lines:
            print(line, file=sys.stderr if item.failed else sys.stdout)


def _keep(result: Result, json: Path) -> None:
    """Write the result; where that fails after all, into the machine's temporary folder."""
    from checklist.result import write

    try:
        write(result, json)
    except UserError as error:
        spare = Path(tempfile.mkdtemp(prefix="checklist-")) / json.name
        try:
            write(result, spare)
        except UserError:
            _say(error.problem)
        else:
            _say(f"{error.problem} It is in {spare} instead.")


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
