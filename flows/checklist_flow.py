"""Is this cluster fit to train on, and if not, which node, link, direction or GPU is at fault?

    python flows/checklist_flow.py run                                      # two nodes on this machine
    python flows/checklist_flow.py run --nodes 1
    python flows/checklist_flow.py run --with kubernetes --nodes 4 --gpus-per-node 8 --profile standard
    python flows/checklist_flow.py --config options nightly.yaml argo-workflows create   # every night at 3

What can be refused is refused before the run begins: see flows/checklist_launch.py. What a node does, and
how the past is read, is in flows/checklist_steps.py. The same checks run without Metaflow:
``python -m checklist``.
"""

from __future__ import annotations

from typing import Any

from metaflow import Config, FlowSpec, Parameter, card, config_expr, current, parallel, schedule, step

from checklist.outputs.terminal import show
from decorators._metaflow import NotFit, final, in_container, main, outlived, user_errors
from decorators.backends.cluster_name import cluster_name, current_cluster
from decorators.card.writer import write_blocks
from decorators.node_request import endings, node_request
from decorators.storage import datastore_root
from flows import checklist_launch, checklist_steps
from flows.checklist_card import draw
from flows.finetune_node import choose_ports
from launchers.cluster.channel import NodeAddress, Secret
from launchers.workdir import work_folder

CARD_ID = "checklist"


def option(name: str, kind: type, text: str) -> Any:
    """A flag of the flow; its default is that of the options file."""
    return Parameter(name.replace("_", "-"), type=kind, default=config_expr(f"options.{name}"), help=text)


def switch(name: str, text: str) -> Any:
    """A flag without a value."""
    return Parameter(name, is_flag=True, type=bool, default=config_expr(f"options.{name}"), help=text)


def read_options(text: str) -> dict[str, Any]:
    """The options file's values over the defaults; a mistake in it is shown as Metaflow shows errors."""
    with user_errors():
        return checklist_launch.read_options(text)


@schedule(cron="0 3 * * ? *")  # six fields: EventBridge takes them all, Argo the first five
class ChecklistFlow(FlowSpec):
    """Test the nodes of a cluster and the network between them."""

    options = Config(
        "options", default_value="", parser=read_options, help="A YAML file with any of the options below."
    )
    nodes = option("nodes", int, "Nodes to test.")
    gpus_per_node = option(
        "gpus_per_node", int, "GPUs of each node. Here: all that there are; 1 rank on CPUs."
    )
    profile = option("profile", str, "quick, standard or deep.")
    only = option("only", str, "Checks to do, with commas.")
    skip = option("skip", str, "Checks to leave out, with commas.")
    device = option("device", str, "auto, cpu or cuda.")
    timeout = option("timeout", float, "Seconds for each phase, instead of the profile's.")
    op_timeout = option("op_timeout", float, "Seconds after which one operation counts as hung.")
    start_timeout = option(
        "start_timeout", float, "Seconds for all nodes to be there: 60 here, 1200 elsewhere."
    )
    thresholds = option("thresholds", str, "A CSV file of your own thresholds, above the shipped ones.")
    system = option("system", str, "What the thresholds call this system.")
    json = option("json", str, "Where to write a copy of the result. Here: checklist-result.json.")
    instance_type = option(
        "instance_type", str, "The machine type to test, for its selector and its network."
    )
    queue = option("queue", str, "Batch job queue, or Kueue LocalQueue.")
    pending_timeout = option("pending_timeout", float, "Minutes that a step may wait for its nodes.")
    priority_class = option("priority_class", str, "On Kubernetes; else the lowest that the cluster has.")
    webhook = switch("webhook", "Post the result to the address in $CHECKLIST_WEBHOOK_URL.")
    prometheus = option("prometheus", str, "A textfile for node_exporter, *.prom.")
    cloudwatch = option("cloudwatch", str, "A file for CloudWatch's embedded metrics; - is standard output.")
    taint = switch("taint", "Taint bad Kubernetes nodes; only says so without --apply.")
    label = switch("label", "Label Kubernetes nodes as fit or not; only says so without --apply.")
    apply = switch("apply", "Really mark the nodes.")
    most_share = option("most_share", float, "Of the cluster's nodes that may be marked in all.")

    @node_request(asks=checklist_launch.ask, role="small")
    @step
    def start(self) -> None:
        """Settle what is done, and on how many nodes."""
        with user_errors():
            values = self._values()
            self.run_config = checklist_launch.resolve(
                values, checklist_launch.read_launch(), datastore=datastore_root()
            )
            if in_container():  # elsewhere it was done before the run
                for line in checklist_launch.check_outputs(values):
                    print(line)
        self.cluster = current_cluster() or cluster_name("local")
        self.key = f"runs/{current.run_id}/measured.json"  # of what is kept of it in the datastore
        self.topology = "many" if self.run_config.options.nodes > 1 else "one"
        self.next({"one": self.check, "many": self.fan_out}, condition="topology")

    @node_request(asks=checklist_launch.ask, role="small")
    @step
    def fan_out(self) -> None:
        """Agree on the ports where the nodes will meet and on what only they know, and start them."""
        self.ports = choose_ports(local=not in_container())
        self.secret = Secret.make()
        self.next(self.check_nodes, num_parallel=self.run_config.options.nodes)

    @outlived("lost")
    @node_request(asks=checklist_launch.ask)
    @step
    def check(self) -> None:
        """Test one node."""
        ports = choose_ports(local=not in_container())
        self._check(node=0, nodes=1, main_host="127.0.0.1", ports=ports, secret=Secret.make())
        self.parts = [(self.node, self.part, self.problem)]
        self.next(self.verdict)

    @outlived("lost")
    @node_request(asks=checklist_launch.ask)
    @parallel
    @step
    def check_nodes(self) -> None:
        """Test several nodes: each of these tasks is one."""
        where = current.parallel
        self._check(
            node=where.node_index,
            nodes=where.num_nodes,
            main_host=where.main_ip,
            ports=self.ports,
            secret=self.secret,
        )
        self.next(self.gather)

    @node_request(asks=checklist_launch.ask, role="small")
    @step
    def gather(self, inputs: Any) -> None:
        """Take what node 0 has collected; the others tell what went wrong."""
        self.merge_artifacts(inputs, include=["run_config", "cluster", "key"])
        self.parts = [(task.node, task.part, task.problem) for task in inputs if hasattr(task, "problem")]
        self.lost = next((task.lost for task in inputs if task.lost is not None), None)
        self.next(self.verdict)

    @card(type="blank", id=CARD_ID)
    @node_request(asks=checklist_launch.ask, role="small")
    @step
    def verdict(self) -> None:
        """Judge, with what earlier runs have left; say it here and on the card."""
        lost = self.lost is not None
        parts = getattr(self, "parts", [])  # none where the step was lost
        kept = checklist_steps.read_kept(self.key) if lost else None
        pods = endings(current.run_id) if lost else ()
        measured = checklist_steps.merge(self.run_config, parts, lost=lost, kept=kept, endings=pods)
        past = checklist_steps.read_past_runs(current.flow_name, self.cluster, current.run_id)
        judged = checklist_steps.judge_run(self.run_config, measured, past)
        self.result = checklist_steps.to_plain(judged)
        self.healthy_nodes, self.bad_nodes = list(judged.healthy_nodes), list(judged.bad_nodes)
        self.kept = checklist_steps.summarise(judged)
        show(judged)
        write_blocks(current.card[CARD_ID], draw(judged, past.runs, self.cluster))
        self.next(self.end)

    @node_request(asks=checklist_launch.ask, role="small")
    @step
    def end(self) -> None:
        """Tell everybody; then fail where training should not begin."""
        judged = checklist_steps.from_plain(self.result)
        values = self._values()
        checklist_steps.publish_result(
            judged,
            checklist_launch.outputs_from(values, self.cluster),
            checklist_launch.result_file(values, here=self.run_config.local),
        )
        task = f"{current.run_id}/verdict"
        print(f"card: python flows/checklist_flow.py card view {task} --id {CARD_ID}")
        refusal = checklist_steps.explain_refusal(judged)
        if refusal is not None:
            raise final(refusal, NotFit)

    def _check(
        self, *, node: int, nodes: int, main_host: str, ports: tuple[int, ...], secret: Secret
    ) -> None:
        self.node = node
        with work_folder(current.run_id, "check", current.task_id) as work:
            self.part, self.problem = checklist_steps.check_node(
                self.run_config,
                NodeAddress(
                    node=node,
                    nodes=nodes,
                    main_host=main_host,
                    ports=ports,
                    secret=secret,
                    run=f"{current.run_id}/{current.step_name}/{current.retry_count}",
                ),
                work,
                self.key,
            )

    def _values(self) -> dict[str, Any]:
        """This run's parameters, as flows.checklist_launch takes them."""
        return {name: getattr(self, name) for name in checklist_launch.DEFAULTS}


if __name__ == "__main__":
    main(ChecklistFlow)
