"""Is this cluster fit to train on, and if not, which node, link, direction or GPU is at fault?

    python flows/checklist_flow.py run                                      # two nodes on this machine
    python flows/checklist_flow.py run --nodes 1
    python flows/checklist_flow.py run --with kubernetes --nodes 4 --gpus-per-node 8 --profile standard
    python flows/checklist_flow.py --config options nightly.yaml argo-workflows create   # every night at 3

Invalid options are rejected before the run starts: see flows/cluster_check/launch.py. What a node does, and
how the past is read, is in flows/cluster_check/steps.py. The same checks run without Metaflow:
``python -m checklist``.
"""

from __future__ import annotations

from estimator import interrupts

if __name__ == "__main__":
    interrupts.end_silently()  # before the imports, which take seconds

# isort: split
from typing import Any

from metaflow import Config, FlowSpec, Parameter, card, config_expr, current, parallel, schedule, step

from checklist.options import help_of, type_of
from checklist.outputs.publish import outputs_of
from checklist.outputs.terminal import show
from decorators._metaflow import NotFit, catch_node_failure, in_container, user_errors, without_retry
from decorators.backends.cluster_name import cluster_name, current_cluster
from decorators.card.writer import write_blocks
from decorators.node_request import node_request, pod_failures
from decorators.storage import datastore_root
from estimator.terminal import print
from flows.cluster_check import launch, steps, suspicions
from flows.cluster_check.card import draw
from flows.cluster_check.flow_options import run_checklist
from flows.cluster_check.launch import FlowOptions
from flows.commands.run_logs import recorded_task
from launchers.base.workdir import work_folder
from launchers.cluster.endpoint import NodeAddress, Secret, choose_ports

CARD_ID = "checklist"


def option(name: str) -> Any:
    """Return a flow parameter for a field of FlowOptions; its default is the options file's value."""
    field = FlowOptions.model_fields[name]
    kind = type_of(field)
    return Parameter(
        name.replace("_", "-"),
        type=kind if kind in (bool, int, float) else str,
        default=config_expr(f"options.{name}"),
        help=help_of(field),
        **({"is_flag": True} if kind is bool else {}),
    )


def read_options(text: str) -> dict[str, Any]:
    """Parse the options file and fill in the defaults; errors are shown like Metaflow's."""
    with user_errors():
        return launch.read_options(text)


@schedule(cron="0 3 * * ? *")  # six fields: EventBridge takes them all, Argo the first five
class ChecklistFlow(FlowSpec):
    """Test the nodes of a cluster and the network between them."""

    options = Config(
        "options", default_value="", parser=read_options, help="A YAML file of options of `run`."
    )
    nodes = option("nodes")
    gpus_per_node = option("gpus_per_node")
    profile = option("profile")
    only = option("only")
    skip = option("skip")
    device = option("device")
    timeout = option("timeout")
    op_timeout = option("op_timeout")
    start_timeout = option("start_timeout")
    thresholds = option("thresholds")
    system = option("system")
    expect = option("expect")
    suspects = option("suspects")
    reference_node = option("reference_node")
    reference_settings = option("reference_settings")
    accept_baseline = option("accept_baseline")
    json = option("json")
    instance_type = option("instance_type")
    queue = option("queue")
    pending_timeout = option("pending_timeout")
    fabric = option("fabric")
    pod_template = option("pod_template")
    priority_class = option("priority_class")
    webhook = option("webhook")
    prometheus = option("prometheus")
    pushgateway = option("pushgateway")
    cloudwatch = option("cloudwatch")
    taint = option("taint")
    label = option("label")
    apply = option("apply")
    most_share = option("most_share")

    @node_request(decide=launch.build_request, role="small")
    @step
    def start(self) -> None:
        """Read the options and decide the number of nodes."""
        with user_errors():
            options = self._options()
            self.run_config = launch.resolve(options, launch.read_launch(), datastore=datastore_root())
            if in_container():  # elsewhere it was done before the run
                for line in launch.check_outputs(options):
                    print(line)
        self.cluster = current_cluster() or cluster_name("local")
        self.suspicions = suspicions.read(self.cluster)
        self.run_config = steps.with_suspects(self.run_config, self.suspicions)
        self.key = f"runs/{current.run_id}/measured.json"  # of what is kept of it in the datastore
        self.topology = "many" if self.run_config.options.nodes > 1 else "one"
        self.next({"one": self.check, "many": self.fan_out}, condition="topology")

    @node_request(decide=launch.build_request, role="small")
    @step
    def fan_out(self) -> None:
        """Choose the ports and the shared secret of the nodes, and start one task per node."""
        self.ports = choose_ports(local=not in_container())
        self.secret = Secret.make()
        self.next(self.check_nodes, num_parallel=self.run_config.options.nodes)

    @catch_node_failure("lost")
    @node_request(decide=launch.build_request)
    @step
    def check(self) -> None:
        """Test one node."""
        ports = choose_ports(local=not in_container())
        self._check(node=0, nodes=1, main_host="127.0.0.1", ports=ports, secret=Secret.make())
        self.parts = [(self.node, self.part, self.problem)]
        self.next(self.verdict)

    @catch_node_failure("lost")
    @node_request(decide=launch.build_request)
    @parallel
    @step
    def check_nodes(self) -> None:
        """Test several nodes; each task is one node."""
        parallel = current.parallel
        self._check(
            node=parallel.node_index,
            nodes=parallel.num_nodes,
            main_host=parallel.main_ip,
            ports=self.ports,
            secret=self.secret,
        )
        self.next(self.gather)

    @node_request(decide=launch.build_request, role="small")
    @step
    def gather(self, inputs: Any) -> None:
        """Collect the measurements of node 0 and the errors of all nodes."""
        self.merge_artifacts(inputs, include=["run_config", "cluster", "key", "suspicions"])
        self.parts = [(task.node, task.part, task.problem) for task in inputs if hasattr(task, "problem")]
        self.lost = next((task.lost for task in inputs if task.lost is not None), None)
        self.next(self.verdict)

    @card(type="blank", id=CARD_ID)
    @node_request(decide=launch.build_request, role="small")
    @step
    def verdict(self) -> None:
        """Judge the measurements, with the history of earlier runs; print the result and draw the card."""
        lost = self.lost is not None
        parts = getattr(self, "parts", [])  # missing if the step failed
        stored = steps.read_stored(self.key) if lost else None
        pods = pod_failures(current.run_id) if lost else ()
        measured = steps.merge(self.run_config, parts, lost=lost, stored=stored, endings=pods)
        past_runs = steps.read_past_runs(current.flow_name, self.cluster, current.run_id)
        judged = steps.judge_run(self.run_config, measured, past_runs, self.suspicions)
        self.result = steps.to_plain(judged)
        self.healthy_nodes, self.bad_nodes = list(judged.healthy_nodes), list(judged.bad_nodes)
        self.kept = steps.summarize(judged)
        show(judged)
        write_blocks(current.card[CARD_ID], draw(judged, past_runs.runs, self.cluster))
        self.next(self.end)

    @node_request(decide=launch.build_request, role="small")
    @step
    def end(self) -> None:
        """Publish the result; then fail if training should not start."""
        judged = steps.from_plain(self.result)
        suspicions.remove_measured(self.suspicions, judged)
        options = self._options()
        steps.publish_result(
            judged,
            outputs_of(options, cluster=self.cluster),
            launch.result_file(options, local=self.run_config.local),
        )
        task = f"{current.run_id}/verdict"
        print(f"card: finetune flow checklist card view {task} --id {CARD_ID}")
        refusal = steps.explain_refusal(judged)
        if refusal is not None:
            raise without_retry(refusal, NotFit)

    def _check(
        self, *, node: int, nodes: int, main_host: str, ports: tuple[int, ...], secret: Secret
    ) -> None:
        self.node = node
        with work_folder(current.run_id, "check", current.task_id) as work_dir, recorded_task(work_dir):
            self.part, self.problem = steps.check_node(
                self.run_config,
                NodeAddress(
                    node=node,
                    nodes=nodes,
                    main_host=main_host,
                    ports=ports,
                    secret=secret,
                    run=f"{current.run_id}/{current.step_name}/{current.retry_count}",
                ),
                work_dir,
                self.key,
            )

    def _options(self) -> FlowOptions:
        """Return this run's options."""
        return launch.options_of({name: getattr(self, name) for name in launch.DEFAULTS})


if __name__ == "__main__":
    run_checklist(ChecklistFlow)
