"""The work of each step of a fine-tuning run; the flow files in flows/ declare the steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from metaflow import current

import checklist  # noqa: F401 Metaflow packs the packages imported at the launch; train imports it later
from decorators._metaflow import in_container, shell_path, user_errors
from decorators.backends import disruptions
from decorators.gpu_profile import current_plan, current_profile
from decorators.storage import datastore
from estimator.formatting import format_count
from estimator.terminal import print
from estimator.vocabulary import TASKS
from flows.commands.flow_commands import command_line, console_script
from flows.commands.run_logs import recorded_task
from flows.finetune import artifacts, flags, harness, scorers
from flows.finetune.parameters import FinetuneParameters
from launchers import engines, run_config
from launchers.base.workdir import work_folder
from launchers.cluster.endpoint import NodeAddress, Secret, choose_ports
from launchers.dataset import mixture, render
from launchers.dataset.preferences import Sample
from launchers.dataset.stored import StoredRows
from launchers.engines.reward_head import as_trained
from launchers.evaluation.result import EvaluationResult
from launchers.harness.run import try_tasks
from launchers.report.metrics import summarize
from launchers.results import hub_push
from launchers.results.handover import PAGE
from launchers.results.model_card import closing_facts, hub_page
from launchers.run import preparation, stages
from launchers.store.bundles import get_bundle, has_bundle, put_bundle

T = TypeVar("T")


@contextmanager
def task_folder(step_name: str) -> Iterator[Path]:
    """Create an empty work folder for this attempt."""
    with work_folder(current.run_id, step_name, current.task_id) as work_dir, recorded_task(work_dir):
        yield work_dir


def next_steps(train: str, model_path: str, task: str) -> list[str]:
    """Format what to do after a run, in three lines. ``train``: RUN/STEP/TASK of the first training node."""
    program = console_script(shell_path())
    card = command_line(sys.argv[0], ["card", "view", train, "--id", "finetune"], program)
    page = Path(model_path) / PAGE
    usage = f"the Python lines in {page}" if page.is_file() else "decorators.fetch_model (docs/models.md)"
    if task != "reward" and not TASKS[task].images:
        usage = f"{program} chat, or {usage}"
    return [f"See the card:   {card}", f"Use the model:  {usage}", f"Compare runs:   {program} runs"]


class FinetuneRun(FinetuneParameters):
    """Parameters and work of a fine-tuning run; each flow declares its steps and their order."""

    def _start(self) -> None:
        """Resolve the settings against the plan; fetch and check the data."""
        with task_folder("start") as work_dir:
            settings = flags.settings_from(self.settings, flags.flags_of(self))
            self.base_model = artifacts.carried_model(settings.model)
            settings = preparation.with_vision(settings, self.base_model.spec)
            self.plan = preparation.check_matches(current_plan(), settings, self.base_model.spec)
            self.used_settings = run_config.resolve(
                settings,
                self.base_model.spec,
                method=self.plan.method,
                engine=self.plan.engine,
                batch=self.plan.layout.global_batch_size,
                plan=self.plan,
            )
            if self.plan.target != "local":  # else the launching process has just printed it
                print(preparation.summarize_plan(self.plan))
            hub_push.check(self.used_settings, must_reach=True)
            try_tasks(harness.fetch_tasks(self.used_settings, work_dir / "tasks"), work_dir / "try")
            print(f"reading {', '.join(mixture.names(self.used_settings))}", flush=True)
            rows = preparation.read_data(self.used_settings, work_dir, fetch=artifacts.fetch_dataset)
            self.rows_key = artifacts.store_rows(datastore(), rows, work_dir / "rows")

    def _prepare(self, samples: Sequence[Sample] | None = None) -> None:
        """Fetch the weights once for the cluster; tokenize the data once for all ranks.

        ``samples``: training rows that replace those of the dataset.
        """
        with task_folder("prepare") as work_dir:
            print(f"fetching {self.base_model.name}", flush=True)
            self.model_reference = artifacts.fetch_weights_once(
                self.base_model,
                work_dir,
                vision=self.used_settings.vision is not None,
                trust_remote_code=self.used_settings.trust_remote_code,
            )
            if TASKS[self.used_settings.task].draws_answers:
                self.reward_model = scorers.fetch_reward_model_once(
                    self.used_settings.rl.reward or "", "rl.reward", work_dir
                )
            model_dir = artifacts.fetch_tokenizer(self.model_reference, work_dir / "model")
            rows, held_out = self._rows(work_dir)
            render.leave_out_torch(self.used_settings)
            info = preparation.tokenize(
                rows if samples is None else samples,
                held_out,
                self.used_settings,
                model_dir,
                work_dir / "data",
            )
            self.data_key = f"data/{info.fingerprint}"
            if not has_bundle(datastore(), self.data_key):
                put_bundle(datastore(), self.data_key, work_dir / "data")
        self.used_settings = self.used_settings.with_checkpoint_interval(info.total_steps, self.plan)

    def _encode(self) -> None:
        """Compute the latents and text embeddings for a UNet, and store them in the datastore."""
        from flows.finetune.node import encode_on_node  # slow to import, unused in most steps

        with task_folder("encode") as work_dir:
            encode_on_node(
                plan=self.plan,
                settings=self.used_settings,
                model=self.base_model,
                weights=self.model_reference,
                data=self.data_key,
                store=datastore(),
                work_dir=work_dir,
            )

    def _rows(self, work_dir: Path) -> tuple[StoredRows, StoredRows | None]:
        """Return the rows for training, and those of the user's held-out file if there is one."""
        get_bundle(datastore(), self.rows_key, work_dir / "rows")
        return preparation.open_stored_rows(work_dir / "rows")

    def _train_alone(self) -> None:
        """Train on one node."""
        self._train(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""))

    def _choose_endpoint(self) -> None:
        """Choose the ports and the shared secret of the channel between the nodes."""
        self.ports = choose_ports(local=not in_container())
        self.secret = Secret.make()

    def _train_node(self) -> None:
        """Train as one node of several: this task is one of the step's parallel tasks."""
        parallel = current.parallel
        self._train(
            node=parallel.node_index,
            nodes=parallel.num_nodes,
            main_host=parallel.main_ip,
            ports=self.ports,
            secret=self.secret,
        )

    def _gather(self, inputs: Any) -> None:
        """Merge the results of the nodes; node 0 holds the model and the metrics."""
        nodes = sorted(inputs, key=lambda task: task.node)
        self.merge_artifacts(inputs, exclude=["node", "outcome", "measured", "plan", "training_task"])
        self.outcome = nodes[0].outcome
        self.plan = self.outcome.plan
        self.measured = nodes[0].measured
        self.training_task = nodes[0].training_task
        self.measured_nodes = [task.measured for task in nodes]

    def _evaluate(self) -> None:
        """Evaluate base and finished model on the held-out rows."""
        self.metrics = [metrics.to_dict() for metrics in self.outcome.metrics]
        self.stage_errors: dict[str, str] = {}
        with task_folder("evaluate") as work_dir:
            self.evaluation = self._attempt(stages.EVALUATION, lambda: self._evaluated(work_dir))
        if self.evaluation is not None:
            current_profile().evaluated(self.evaluation)

    def _evaluated(self, work_dir: Path) -> EvaluationResult:
        get_bundle(datastore(), self.outcome.finished_model, work_dir / "finished")
        return stages.evaluate(
            self.used_settings,
            self.plan,
            base_dir=as_trained(
                artifacts.fetch_model(self.model_reference, work_dir / "base"), self.used_settings, work_dir
            ),
            model_dir=engines.result_of(work_dir / "finished"),
            data_dir=artifacts.fetch_bundle(datastore(), self.data_key, work_dir / "data"),
            work=work_dir / "evaluation",
            reward=self._reward(work_dir),
        )

    def _attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Return the value of a stage, or None after an error.

        Errors go into the artifact ``stage_errors``, the step of the first one into ``failed_step``.
        """
        result = stages.attempt(stage, function)
        if result.error is not None:
            if not self.stage_errors:
                self.failed_step = current.step_name
            self.stage_errors = {**self.stage_errors, stage: result.error}
        return result.value

    def _run_tasks(self) -> None:
        """Score base and finished model on the tasks; what an earlier attempt has scored is kept."""
        with task_folder("harness") as work_dir:
            self.task_metrics = self._attempt(
                stages.HARNESS,
                lambda: harness.run_tasks(
                    self.used_settings,
                    self.plan,
                    base=self.model_reference,
                    finished=self.outcome.finished_model,
                    work_dir=work_dir,
                ),
            )
        if self.task_metrics is not None:
            current_profile().scored(self.task_metrics)

    def _export(self) -> None:
        """Collect the facts of the run, and write the finished model to the output folder."""
        with user_errors():
            summary, peak = summarize(self.outcome.metrics), self.measured.memory_peak
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
        with user_errors(), task_folder("push") as work_dir:
            get_bundle(datastore(), self.outcome.finished_model, work_dir / "finished")
            settings = self.used_settings
            page = hub_page(work_dir / "finished", self.plan, settings, self.facts, model=self.base_model)
            self.model_url = self._attempt(
                stages.PUSH,
                lambda: stages.push(work_dir / "finished", page, settings, model_dir=Path(self.model_path)),
            )

    def _reward(self, work_dir: Path) -> str | None:
        """Return the scorer of answers for task grpo, on this machine; None for other tasks."""
        settings = self.used_settings
        if not TASKS[settings.task].draws_answers:
            return None
        return scorers.fetch_scorer(settings.rl.reward or "", self.reward_model, work_dir)

    def _train(
        self, *, node: int, nodes: int, main_host: str, ports: tuple[int, ...], secret: Secret
    ) -> None:
        from flows.finetune.node import join_timeout_s, train_on_node  # slow to import, unused in most steps

        self.node = node
        self.training_task = f"{current.run_id}/{current.step_name}/{current.task_id}"
        launch = disruptions.of_run(current.run_id).launch(current.step_name, current.retry_count)
        layout = self.plan.layout
        processes = format_count(layout.processes_per_node, "process")
        print(f"node {node}: starting {processes} with {self.plan.engine}", flush=True)
        with task_folder("train") as work_dir:
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
                work_dir=work_dir,
                reward=self._reward(work_dir),
            )
        self.measured = self.outcome.measured
        self.plan = self.outcome.plan

    def _report(self) -> None:
        """Print example answers, predicted and measured values, where the model is, and the next steps."""
        lines = stages.closing_lines(
            self.facts,
            self.evaluation,
            Path(self.model_path),
            url=getattr(self, "model_url", None),
            errors=self.stage_errors,
        )
        lines += next_steps(self.training_task, self.model_path, self.used_settings.task)
        if self.stage_errors:
            args = ["resume", self.failed_step, "--origin-run-id", current.run_id]
            lines.append(f"Try again:      {command_line(sys.argv[0], args, console_script(shell_path()))}")
        print("\n".join(lines))
