"""The steps of a fine-tuning run, but for the way through them: finetune_flow.py and finetune_linear_flow.py.

Metaflow lets a flow inherit steps and parameters. Each step here does its work and goes on to the next; where
the two flows differ, they have a step of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from metaflow import Config, FlowSpec, Parameter, config_expr, current, retry, step

from decorators._metaflow import shell_path, user_errors
from decorators.backends import disruptions
from decorators.gpu_profile import current_plan, current_profile, gpu_profile
from decorators.storage import datastore
from estimator.cli.common import COMMON
from estimator.errors import spelled_as
from estimator.vocabulary import TASKS
from flows.commands.flow_commands import command_line, config_file, console_script
from flows.commands.run_help import CHECKS
from flows.commands.run_logs import recorded_task
from flows.finetune import artifacts, harness, planning, scorers
from flows.finetune.node import encode_on_node, join_timeout_s, train_on_node
from launchers import engines, run_config
from launchers.base.workdir import work_folder
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset import mixture
from launchers.dataset.preferences import Sample
from launchers.dataset.stored import StoredRows
from launchers.engines.reward_head import as_trained
from launchers.evaluation.evaluate import EvaluationResult
from launchers.harness.run import try_tasks
from launchers.report.metrics import summarise
from launchers.results import hub_push
from launchers.results.handover import PAGE
from launchers.results.model_card import closing_facts, hub_page
from launchers.run import preparation, stages
from launchers.settings import choices_of, help_of, parse_yaml
from launchers.store.bundles import get_bundle, has_bundle, put_bundle

T = TypeVar("T")


def knob(name: str, kind: type = str) -> Any:
    """A flag of the flow; its default is the settings file's value, its help the setting's own."""
    where = planning.FLAGS[name]
    choices = f" One of {', '.join(choices_of(where))}." if choices_of(where) else ""
    return Parameter(
        name.replace("_", "-"),
        type=kind,
        default=config_expr(f"settings.{where}"),
        help=help_of(where) + choices,
    )


def text_knob(name: str) -> Any:
    """A flag whose setting is not plain text: empty means as in the settings file."""
    where = planning.FLAGS[name]
    return Parameter(name.replace("_", "-"), type=str, default="", help=help_of(where))


def switch(name: str) -> Any:
    """A flag without a value; where it isn't given, the settings file's value holds."""
    help_text = help_of(planning.FLAGS[name])
    return Parameter(name.replace("_", "-"), is_flag=True, default=False, help=help_text)


def check_switch(name: str) -> Any:
    """A flag of the flow that is no setting."""
    return Parameter(name, is_flag=True, default=False, help=CHECKS[name])


def read_settings(text: str) -> dict[str, Any]:
    """Parse the settings file and fill in the defaults; show a mistake in it as Metaflow shows errors."""
    with user_errors():
        return parse_yaml(text, config_file(sys.argv[1:], "settings").parent)


@contextmanager
def task_folder(step_name: str) -> Iterator[Path]:
    """An empty work folder for this attempt; a UserError in it names options as the flow takes them."""
    with (
        spelled_as(planning.FLOW),
        work_folder(current.run_id, step_name, current.task_id) as work,
        recorded_task(work),
    ):
        yield work


def next_steps(train: str, model_path: str, task: str) -> list[str]:
    """Format what to do after a run, in three lines. ``train``: name of the training step."""
    program = console_script(shell_path())
    card = command_line(sys.argv[0], ["card", "view", train, "--id", "finetune"], program)
    page = Path(model_path) / PAGE
    usage = f"the Python lines in {page}" if page.is_file() else "decorators.fetch_model (docs/models.md)"
    if task != "reward" and not TASKS[task].images:
        usage = f"{program} chat, or {usage}"
    return [
        f"See the card:   {card}",
        f"Use the model:  {usage}",
        f"Compare runs:   {program} runs",
    ]


class FinetuneSteps(FlowSpec):
    """Steps that every fine-tuning flow has."""

    settings = Config(
        "settings",
        default_value="",
        parser=read_settings,
        help="A YAML file of settings (launchers/settings/settings.schema.json says which there are).",
    )
    model = knob("model")
    task = knob("task")
    method = knob("method")
    engine = knob("engine")
    dataset = knob("dataset")
    seq_len = knob("seq_len", int)
    resolution = knob("resolution", int)
    packing = knob("packing", bool)
    epochs = knob("epochs", int)
    max_steps = knob("max_steps", int)
    tokens = text_knob("tokens")
    global_batch_size = knob("global_batch_size", int)
    micro_batch_size = knob("micro_batch_size", int)
    lr = text_knob("lr")
    precision = knob("precision")
    activation_checkpointing = text_knob("activation_checkpointing")
    seed = knob("seed", int)
    trial = knob("trial", int)
    checkpoint_every = knob("checkpoint_every", int)
    eval_every = knob("eval_every", int)
    profile_steps = text_knob("profile_steps")
    tracker = text_knob("tracker")
    output_dir = knob("output_dir")
    eval_harness = text_knob("eval_harness")
    adapter_only = switch("adapter_only")
    push = knob("push")
    nodes = knob("nodes", int)
    gpus = knob("gpus", int)
    gpu = knob("gpu")
    instance_type = knob("instance_type")
    cloud = knob("cloud")
    from_catalogue = switch("from_catalogue")
    capacity = knob("capacity")
    spot = switch("spot")
    device = knob("device")
    queue = knob("queue")
    zone = knob("zone")
    pending_timeout = knob("pending_timeout", float)
    max_disruptions = knob("max_disruptions", int)
    fabric = knob("fabric")
    overrides = Parameter("set", default="", multiple=True, help=CHECKS["set"])
    no_calibration = check_switch("no-calibration")
    no_preflight = check_switch("no-preflight")
    ignore_checklist = check_switch("ignore-checklist")
    plan_only = Parameter("plan-only", is_flag=True, default=False, help=COMMON["plan_only"].text)
    verbose = Parameter("verbose", is_flag=True, default=False, help=COMMON["verbose"].text)

    @gpu_profile(plan=planning.plan_from_parameters, request="none")
    @step
    def start(self) -> None:
        """Settle the settings and the plan; fetch and check the data."""
        with task_folder("start") as work:
            settings = planning.settings_from(self.settings, planning.flags_of(self))
            self.base_model = artifacts.carried_model(settings.model)
            self.plan = preparation.check_matches(current_plan(), settings)
            self.used_settings = run_config.resolve(
                settings,
                self.base_model.spec,
                method=self.plan.method,
                engine=self.plan.engine,
                batch=self.plan.layout.global_batch_size,
            )
            if self.plan.target != "local":  # else the launching process has just printed it
                print(preparation.summarise_plan(self.plan))
            hub_push.check(self.used_settings, must_reach=True)
            try_tasks(harness.fetch_tasks(self.used_settings, work / "tasks"), work / "try")
            print(f"reading {', '.join(mixture.names(self.used_settings))}", flush=True)
            rows = preparation.read_data(self.used_settings, work, fetch=artifacts.fetch_dataset)
            self.rows_key = artifacts.keep_rows(datastore(), rows, work / "rows")
        self.next(self.prepare)

    @gpu_profile(plan=planning.plan_from_parameters)
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self) -> None:
        """Train on one node."""
        self._train(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""))
        self.next(self.evaluate)

    @gpu_profile(plan=planning.plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Held-out loss before and after, a few answers of the finished model, and tasks' metrics.

        A flow with branches has a step of their own for the tasks.
        """
        self._evaluate()
        if self.used_settings.harness.tasks:
            self._run_tasks()
        self.next(self.export)

    @step
    def export(self) -> None:
        """Put the model where the user can take it, with a page that says what it is, and onto the Hub.

        A flow with branches has a step of its own for the Hub.
        """
        self._export()
        if self.used_settings.export.push:
            self._push()
        self.next(self.end)

    @step
    def end(self) -> None:
        """Print example answers, predicted and measured values, where the model is, and the next steps."""
        lines = stages.closing_lines(
            self.facts,
            self.evaluation,
            Path(self.model_path),
            url=getattr(self, "model_url", None),
            errors=self.stage_errors,
        )
        train = "train_nodes" if self.plan.layout.nodes > 1 else "train"
        lines += next_steps(train, self.model_path, self.used_settings.task)
        if self.stage_errors:
            words = ["resume", self.failed_step, "--origin-run-id", current.run_id]
            lines.append(f"Try again:      {command_line(sys.argv[0], words, console_script(shell_path()))}")
        print("\n".join(lines))

    def _prepare(self, kept: Sequence[Sample] | None = None) -> None:
        """Fetch the weights once for the cluster; tokenise the data once for all ranks.

        ``kept``: rows that are trained on instead of those that were read.
        """
        with task_folder("prepare") as work:
            print(f"fetching {self.base_model.name}", flush=True)
            self.model_reference = artifacts.fetch_weights_once(self.base_model, work)
            if TASKS[self.used_settings.task].draws_answers:
                self.reward_model = scorers.fetch_reward_model_once(
                    self.used_settings.rl.reward or "", "rl.reward", work
                )
            model_dir = artifacts.fetch_tokenizer(self.model_reference, work / "model")
            rows, held_out = self._rows(work)
            info = preparation.tokenise(
                rows if kept is None else kept, held_out, self.used_settings, model_dir, work / "data"
            )
            self.data_key = f"data/{info.fingerprint}"
            if not has_bundle(datastore(), self.data_key):
                put_bundle(datastore(), self.data_key, work / "data")
        self.used_settings = self.used_settings.with_checkpoint_interval(info.total_steps, self.plan)

    def _encode(self) -> None:
        """Compute what a UNet is trained on, and store it where the nodes that train look for it."""
        with task_folder("encode") as work:
            encode_on_node(
                plan=self.plan,
                settings=self.used_settings,
                model=self.base_model,
                weights=self.model_reference,
                data=self.data_key,
                store=datastore(),
                work=work,
            )

    def _rows(self, work: Path) -> tuple[StoredRows, StoredRows | None]:
        """The rows that were read, and those of a held-out file of the user's own."""
        get_bundle(datastore(), self.rows_key, work / "rows")
        return preparation.stored_data(work / "rows")

    def _evaluate(self) -> None:
        """Measure base and finished model on what was held out."""
        self.metrics = [metrics.to_dict() for metrics in self.outcome.metrics]
        self.stage_errors: dict[str, str] = {}
        with task_folder("evaluate") as work:
            self.evaluation = self._attempt(stages.EVALUATION, lambda: self._evaluated(work))
        if self.evaluation is not None:
            current_profile().evaluated(self.evaluation)

    def _evaluated(self, work: Path) -> EvaluationResult:
        get_bundle(datastore(), self.outcome.finished_model, work / "finished")
        return stages.evaluate(
            self.used_settings,
            self.plan,
            base_dir=as_trained(
                artifacts.fetch_model(self.model_reference, work / "base"), self.used_settings, work
            ),
            model_dir=engines.result_of(work / "finished"),
            data_dir=artifacts.fetch_bundle(datastore(), self.data_key, work / "data"),
            work=work / "evaluation",
            reward=self._reward(work),
        )

    def _attempt(self, stage: str, work: Callable[[], T]) -> T | None:
        """Return the value of a stage, or None after an error.

        Errors go into the artifact ``stage_errors``, the step of the first one into ``failed_step``.
        """

        def spelled() -> T:
            with spelled_as(planning.FLOW):
                return work()

        result = stages.attempt(stage, spelled)
        if result.error is not None:
            if not self.stage_errors:
                self.failed_step = current.step_name
            self.stage_errors = {**self.stage_errors, stage: result.error}
        return result.value

    def _run_tasks(self) -> None:
        """Score base and finished model on the tasks; what an earlier attempt has scored is kept."""
        with task_folder("harness") as work:
            self.task_metrics = self._attempt(
                stages.HARNESS,
                lambda: harness.run_tasks(
                    self.used_settings,
                    self.plan,
                    base=self.model_reference,
                    finished=self.outcome.finished_model,
                    work=work,
                ),
            )
        if self.task_metrics is not None:
            current_profile().scored(self.task_metrics)

    def _export(self) -> None:
        """The facts of the run, and the finished model where the user can take it."""
        with user_errors():
            summary, peak = summarise(self.outcome.metrics), self.measured.memory_peak
            self.facts = closing_facts(self.plan, summary, peak, self.evaluation, self.outcome.exported)
            if self.used_settings.harness.tasks and self.task_metrics is not None:
                self.facts += self.task_metrics.facts()
            self.model_path = artifacts.export(
                storage=datastore(),
                output=self.outcome.finished_model,
                run=current.run_id,
                plan=self.plan,
                settings=self.used_settings,
                model=self.base_model,
                facts=self.facts,
                flow="rejection" if hasattr(self, "selection") else "finetune",
            )

    def _push(self) -> None:
        """Send the finished model to the Hub."""
        with user_errors(), task_folder("push") as work:
            get_bundle(datastore(), self.outcome.finished_model, work / "finished")
            settings = self.used_settings
            page = hub_page(work / "finished", self.plan, settings, self.facts, model=self.base_model)
            self.model_url = self._attempt(
                stages.PUSH,
                lambda: stages.push(work / "finished", page, settings, model_dir=Path(self.model_path)),
            )

    def _reward(self, work: Path) -> str | None:
        """Return the scorer of answers for task grpo, on this machine; None for other tasks."""
        settings = self.used_settings
        if not TASKS[settings.task].draws_answers:
            return None
        return scorers.fetch_scorer(settings.rl.reward or "", self.reward_model, work)

    def _train(
        self, *, node: int, nodes: int, main_host: str, ports: tuple[int, ...], secret: Secret
    ) -> None:
        self.node = node
        launch = disruptions.of_run(current.run_id).launch(current.step_name, current.retry_count)
        layout = self.plan.layout
        print(
            f"node {node}: starting {layout.processes_per_node} process(es) with {self.plan.engine}",
            flush=True,
        )
        with task_folder("train") as work:
            self.outcome = train_on_node(
                plan=self.plan,
                settings=self.used_settings,
                model=self.base_model,
                weights=self.model_reference,
                data=self.data_key,
                address=NodeAddress(
                    node=node,
                    nodes=nodes,
                    main_host=main_host,
                    ports=ports,
                    secret=secret,
                    run=f"{current.run_id}/{current.step_name}/{launch}",
                    join_timeout_s=join_timeout_s(self.used_settings),
                ),
                launch=launch,
                store=datastore(),
                work=work,
                reward=self._reward(work),
            )
        self.measured = self.outcome.measured
        self.plan = self.outcome.plan
