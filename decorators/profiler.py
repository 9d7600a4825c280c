"""Profile: record of a running step from samples and telemetry, and its card."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from decorators import _metaflow
from decorators.card.state import CardState, Setting
from decorators.profile.measured import GpuMeasured, Measured
from decorators.profile.sampling import Sampler
from estimator.errors import UserError
from estimator.plan import Plan
from launchers.report.state import RunState
from launchers.report.telemetry import CHECKPOINTS_VARIABLE, Event, Step, Writer, memory_now

if TYPE_CHECKING:
    from decorators import usage
    from decorators.own_checkpoints import OwnCheckpoints
    from estimator.rightsizing.recommend import Recommendation
    from estimator.rightsizing.usage import Ending
    from launchers.evaluation.result import EvaluationResult
    from launchers.harness.result import HarnessResult
    from launchers.run.trial import TrialResult

_log = logging.getLogger(__name__)

FIRST_CARD_SECONDS = 2.0
CARD_SECONDS = 5.0  # minimum interval between card updates
MAX_CARD_SECONDS = 20.0  # maximum interval, regardless of the run's age and the rendering cost
CARD_AGE_SHARE = 0.02  # of a run's age: interval between updates, longer for long runs
CARD_CPU_SHARE = 0.02  # of one core: CPU time for rendering
LAST_CARD_SECONDS = 10.0  # maximum wait at the end of a step for an upload in progress


class Profile:
    """Record of the running step.

    Parameters
    ----------
    plan:
        The plan; None if nothing was predicted.
    step:
        The step's name.
    interval_s:
        Minimum seconds between two samples.
    card:
        Metaflow's CardComponentManager, or None.
    index:
        Position of the task in the enclosing foreach steps.
    about:
        The run's plan, for the title of a step that it makes no predictions for.
    """

    def __init__(
        self,
        *,
        plan: Plan | None,
        step: str,
        interval_s: float = 1.0,
        card: Any | None = None,
        about: Plan | None = None,
        index: str = "",
    ) -> None:
        self._run = RunState(plan)
        self._about = about
        self._settings: tuple[Setting, ...] = ()
        self._log: Callable[[], str] = str
        self._log_tail = ""
        self._step = step
        self._card = card
        self._lock = threading.Lock()
        self._trials: list[TrialResult] = []
        self._evaluation: EvaluationResult | None = None
        self._index = index
        self._checkpoints: OwnCheckpoints | None = None
        self._exported: tuple[tuple[str, str], ...] = ()
        self._usage: usage.UsageRecorder | None = None
        self._outcome: Ending = "succeeded"  # if the step ended now
        self._task_metrics: HarnessResult | None = None
        self._sampler = Sampler(interval_s, foreign=_metaflow.local_node_command())
        self._started = time.time()  # for the card; durations use a clock that is never set back
        self._begun = self._reported = time.monotonic()
        self._own_loop = False  # the step's own code trains, not a launched engine
        self.loop_without_torch = False  # steps were reported by a process that has not imported torch
        self._ended: float | None = None
        self._duration: float | None = None
        self._failed: str | None = None
        self._card_seconds = 0.0
        self._ending = threading.Event()
        self._drawer = threading.Thread(target=self._draw_loop, name="gpu-profile-card", daemon=True)

    def start(self) -> None:
        """Start sampling, and drawing the card if there is one."""
        self._sampler.start()
        if self._card is not None:
            self._drawer.start()

    def stop(self, failed: str | None = None, ending: Ending = "succeeded") -> None:
        """Stop sampling and draw the last state of the card; ``failed``: text of the error."""
        self._outcome = ending
        if self._checkpoints is not None:
            self._checkpoints.end(succeeded=failed is None)
        self._sampler.stop()
        self._ended, self._failed = time.time(), failed
        self._duration = time.monotonic() - self._begun
        self._ending.set()
        if self._card is None:
            return
        self._drawer.join(LAST_CARD_SECONDS)
        if failed is None:
            self._draw(publish=False)  # Metaflow publishes the card of a finished step
        else:
            _metaflow.after_error_message(lambda: self._draw(publish=True))

    @property
    def plan(self) -> Plan:
        """Plan of this attempt. Raises UserError if the step has none."""
        plan = self._run.plan or self._about
        if plan is None:
            raise UserError(
                f"Step {self._step} has no plan: its @gpu_profile names no model."
                if self._step
                else "There is no plan outside of a step with @gpu_profile.",
                'Write @gpu_profile(model="llama-8b", method="lora"), for example.'
                if self._step
                else "Read current.gpu_profile.plan in the step, and give it to the script.",
            )
        return plan

    @property
    def predicted(self) -> Plan | None:
        """Plan whose predictions the measurements are compared with; None without predictions."""
        return self._run.plan

    def follow(self, run: RunState) -> None:
        """Use ``run``, which the caller updates, instead of this profile's own state."""
        self._run = run

    def trial(self, result: TrialResult) -> None:
        """Record one plan's trial, and reset the peaks, so that the run does not count the trial's."""
        with self._lock, self._sampler.lock:
            self._trials.append(result)
            self._sampler.samples.forget_peaks()

    def evaluated(self, result: EvaluationResult) -> None:
        """Record the result of an evaluation for the card."""
        with self._lock:
            self._evaluation = result

    def exported(self, rows: Sequence[tuple[str, str]]) -> None:
        """Record the exported step and why it was chosen, as rows of (name, value) for the card."""
        with self._lock:
            self._exported = tuple(rows)

    def scored(self, result: HarnessResult) -> None:
        """Record the results of lm-evaluation-harness tasks for the card."""
        with self._lock:
            self._task_metrics = result

    def expect(self, *, total_steps: int, tokens_of_steps: Sequence[int] | None = None) -> None:
        """Set the total number of optimizer steps, for the card's progress and ETA.

        ``tokens_of_steps``: tokens of each step, over all processes of the run. Needed because a node sees
        only its own ranks, and rows on other nodes may be longer.
        """
        self._run.total_steps, self._run.tokens_of_steps = total_steps, tokens_of_steps

    def compare_requests(self, recorder: usage.UsageRecorder) -> None:
        """Show on the card what was requested, and what right-sizing would request next."""
        self._usage = recorder

    def note(self, text: str) -> None:
        """Add a line to the card."""
        self._sampler.note(text)

    def describe(self, settings: Sequence[Setting], log: Callable[[], str]) -> None:
        """Set the step's hyperparameters and a function that returns the end of its log, for the card."""
        self._settings, self._log = tuple(settings), log

    def add(self, event: Event) -> None:
        """Add a telemetry event of a rank."""
        self._run.add(event)

    def report(
        self,
        *,
        step: int,
        loss: float | None = None,
        tokens: int = 0,
        samples: int = 0,
        lr: float | None = None,
        seconds: float | None = None,
        data_seconds: float | None = None,
    ) -> None:
        """Report one optimizer step of a training loop in this process, for the card and the measurements.

        Parameters
        ----------
        step:
            Number of the step; 1 is the first.
        loss:
            Mean loss over the step's tokens.
        tokens, samples:
            Tokens that went through the model in this step, without padding, and sequences.
        lr:
            Learning rate.
        seconds:
            Duration of the step. By default the time since the last report, or since the task's start.
        data_seconds:
            Part of it in which the loop waited for data. The card names it as the cause of idle GPUs.
        """
        self._own_loop = True
        self.loop_without_torch = "torch" not in sys.modules
        now = time.monotonic()
        elapsed = now - self._reported if seconds is None else seconds
        self._reported = now
        rank = int(os.environ.get("RANK", "0"))
        self.add(memory_now(rank, step))
        self.add(
            Step(
                rank=rank,
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=None,
                samples=samples,
                tokens=tokens,
                dt=elapsed,
                dtf=None,
                dtb=None,
                loading=data_seconds,
            )
        )

    def transformers_callback(self) -> Any:
        """Make a callback for ``transformers.Trainer`` and TRL's trainers that reports the logged steps."""
        from decorators.callbacks import for_transformers

        return for_transformers(self.report)

    def lightning_callback(self) -> Any:
        """Make a callback for ``lightning.Trainer`` that reports the optimizer steps."""
        from decorators.callbacks import for_lightning

        return for_lightning(self.report)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder for the script's own checkpoints on this node, with those of an earlier attempt in it.

        While the step runs, its files are stored in the run's datastore when they no longer change. A
        retry and a resumed run find them here again, on all nodes.
        """
        if self._checkpoints is None:
            from decorators.own_checkpoints import OwnCheckpoints

            self._checkpoints = OwnCheckpoints(self._index)
        return self._checkpoints.folder

    def torchrun(
        self,
        script: str | Path | Callable[..., Any],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        *,
        processes_per_node: int | None = None,
        hang_timeout_s: float = 1800.0,
    ) -> None:
        """Run a training script, or a function, in every process of this step's nodes, as torchrun does.

        In a step with ``num_parallel`` every task is one node, and all of them make this call. The output of
        each node's first rank is copied to the task's output. The script reports its steps with
        ``current_profile().report(...)``.

        Parameters
        ----------
        script:
            Path of a script that works with torchrun, or a function at the top level of a file.
        arguments:
            Command-line arguments of the script, or positional arguments of the function.
        keywords:
            Keyword arguments of the function.
        processes_per_node:
            By default as planned. Without a plan, one per visible GPU, or one process without GPUs.
        hang_timeout_s:
            Seconds without a report after which a rank counts as hung, once it has reported.

        Raises
        ------
        UserError
            There is no such script or function, or the nodes do not match the plan.
        RankFailed, RankHung, NodeLost
            The root cause, the same on every node.
        """
        from decorators.own_script import torchrun

        self._own_loop = True
        torchrun(
            self._run.plan,
            self.add,
            self.checkpoint_dir,
            script,
            arguments,
            keywords,
            processes_per_node=processes_per_node,
            hang_timeout_s=hang_timeout_s,
        )

    def measured(self) -> Measured:
        """Return the measurements so far, after waiting at most 5 s for the step's first sample."""
        self._sampler.wait_for_first_sample(5)
        run = self._run.snapshot()
        with self._lock, self._sampler.lock:
            return self._measured(run)

    def state(self) -> CardState:
        """Return the current state of the card."""
        with contextlib.suppress(OSError):  # the folder is removed at the end of the step
            self._log_tail = self._log() or self._log_tail
        run = self._run.snapshot()
        with self._lock, self._sampler.lock:
            measured = self._measured(run)
            return CardState(
                run=run,
                measured=measured,
                gpu_samples=tuple(self._sampler.samples.gpus.samples),
                host_samples=tuple(self._sampler.samples.host.samples),
                started=self._started,
                ended=self._ended,
                failed=self._failed,
                trials=tuple(self._trials),
                evaluation=self._evaluation,
                task_metrics=self._task_metrics,
                about=self._about,
                settings=self._settings,
                log_tail=self._log_tail,
                exported=self._exported,
                requested=self._usage.requested if self._usage is not None else None,
                next_request=self._next_request(measured),
            )

    def _next_request(self, measured: Measured) -> Recommendation | None:
        if self._usage is None or self._about is not None or self._run.plan is not None:
            return None  # a plan decides
        return self._usage.next_request(measured, self._outcome)

    def _measured(self, run: RunState) -> Measured:
        samples, sampler = self._sampler.samples, self._sampler
        duration = self._duration or time.monotonic() - self._begun
        price = run.plan.prediction.usd_per_hour if run.plan else None
        mean_cores = sampler.cpu_seconds / duration if samples.host.count > 1 else None
        return Measured(
            step=self._step,
            node=int(os.environ.get("MF_PARALLEL_NODE_INDEX", "0")),
            host=socket.gethostname(),
            duration_seconds=duration,
            samples=samples.count,
            sampling_seconds=sampler.own_cpu_seconds + self._card_seconds,
            gpus=self._gpus(),
            ranks=run.ranks,
            host_total_bytes=int(psutil.virtual_memory().total),
            host_rss_peak_bytes=samples.rss_peak or None,
            host_pss_peak_bytes=samples.pss_of_peak,
            mean_cpu_cores=mean_cores,
            busy_cpu_cores=samples.busy_cpu_cores or mean_cores,
            shared_memory_peak_bytes=samples.shared_memory_peak,
            disk_free_min_bytes=samples.disk_free_min,
            steps=run.last_step,
            tokens_per_second=run.tokens_per_second,
            mfu=run.mfu,
            usd=price * duration / 3600 if price is not None else None,
            notes=tuple(sampler.notes),
            checkpoint_seconds=run.checkpoint_seconds,
            own_loop=self._own_loop,
            step_tokens=run.step_tokens,
            data_wait_share=max(
                (loading / dt for loading, dt in run.data_waits.values() if dt > 0), default=None
            ),
        )

    def _gpus(self) -> tuple[GpuMeasured, ...]:
        samples = self._sampler.samples
        if len(samples.gpu_peak) != len(self._sampler.gpus):
            return ()
        return tuple(
            GpuMeasured(
                index=info.index,
                name=info.name,
                total_bytes=info.total_bytes,
                start_used_bytes=samples.gpu_start[i],
                peak_used_bytes=samples.gpu_peak[i],
                mean_utilization=busy_seconds / seconds if seconds > 0 else None,
                peak_power_watts=samples.gpu_power_peak[i],
                peak_temperature_celsius=samples.gpu_temperature_peak[i],
            )
            for i, info in enumerate(self._sampler.gpus)
            for busy_seconds, seconds in [samples.gpu_utilization[i]]
        )

    def _draw_loop(self) -> None:
        """Body of the card's thread: draw as often as the CPU budget allows."""
        pause = FIRST_CARD_SECONDS
        if self._usage is not None and not self._ending.wait(pause):
            try:
                self._usage.read_history()
            except Exception as error:  # noqa: BLE001 - the next request then rests on this task alone
                _log.info("Earlier tasks of the step could not be read: %s", error)
            pause = 0.0
        while not self._ending.wait(pause):
            start = time.thread_time()
            self._draw(publish=True)
            self._card_seconds = time.thread_time()
            cost = self._card_seconds - start
            pause = max(
                cost / CARD_CPU_SHARE, (time.monotonic() - self._begun) * CARD_AGE_SHARE, CARD_SECONDS
            )
            pause = min(pause, MAX_CARD_SECONDS)

    def _draw(self, *, publish: bool) -> None:
        from decorators.card.writer import write

        try:
            write(self._card, self.state())
            if publish:
                _metaflow.push_card(self._card)
        except Exception as error:  # noqa: BLE001  # a card never breaks a step
            self._sampler.note(f"The card could not be drawn: {type(error).__name__}: {error}")


class _NoProfile(Profile):
    """Profile outside of a profiled step: accepts all calls and does nothing."""

    def __init__(self) -> None:
        super().__init__(plan=None, step="")

    def start(self) -> None:
        pass

    def add(self, event: Event) -> None:
        pass


NO_PROFILE: Profile = _NoProfile()


class RankProfile(_NoProfile):
    """Profile in a rank of the user's own script: events go to the step's task, which measures."""

    def __init__(self, telemetry_dir: Path) -> None:
        super().__init__()
        self._writer = Writer(telemetry_dir, int(os.environ.get("RANK", "0")))

    def add(self, event: Event) -> None:
        """Send an event of this rank to the step's task."""
        self._writer.write(event)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the step's task for checkpoints, which all ranks of a node share."""
        return Path(os.environ[CHECKPOINTS_VARIABLE])
