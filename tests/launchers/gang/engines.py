"""Engines without training that break a gang on request, by ``settings.engine_options``.

``Steps`` also runs whole flows, in tests of what a cluster does to a run (tests.lab.small_engine).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv, mark_part_complete, scheduler_name
from launchers.report.telemetry import DistInfo, Phase, Step, Writer


class Stepper:
    """Steps of ``step_s`` seconds; at step ``at``, rank ``rank`` does what ``do`` names."""

    def unsupported_settings(self, settings: Any) -> str | None:  # noqa: ARG002
        return None

    def collect(self, job: TrainJob, destination: Path) -> None:
        raise NotImplementedError

    def train(self, job: TrainJob) -> None:
        orders, env = job.settings.engine_options, RankEnv.read()
        writer, cadence = Writer(job.telemetry_dir, env.rank), Cadence(job, env)
        writer.write(
            DistInfo(
                rank=env.rank,
                local_rank=env.local_rank,
                world_size=env.world_size,
                node=env.node,
                host="here",
                device="cpu",
                backend="none",
                scheduler=scheduler_name(),
                engine="stepper",
                pid=os.getpid(),
            )
        )
        if env.rank in orders.get("ignores_sigterm", ()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if orders.get("child"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        for step in range(job.start_step + 1, job.total_steps + 1):
            if step == orders.get("at") and env.rank in orders.get("ranks", [0]):
                inject_fault(orders["do"], job)
            time.sleep(orders.get("step_s", 0.05))
            writer.write(
                Step(
                    rank=env.rank,
                    step=step,
                    loss=1.0 / step,
                    lr=None,
                    grad_norm=None,
                    samples=1,
                    tokens=1,
                    dt=0.1,
                    dtf=None,
                    dtb=None,
                    in_collectives=orders.get("in_collectives", [None] * env.world_size)[env.rank],
                )
            )
            if cadence.writes_after(step) or (job.checkpoint_every and step % job.checkpoint_every == 0):
                writer.write(Phase(rank=env.rank, name="checkpoint", step=step))
                folder = job.checkpoint_dir(step)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"state-{env.rank}.bin").write_bytes(b"%d" % step * 1000)
                if "more_bytes" in orders:
                    (folder / f"more-{env.rank}.bin").write_bytes(os.urandom(orders["more_bytes"]))
                time.sleep(orders.get("checkpoint_s", 0.0))
                mark_part_complete(folder, env, step)
                cadence.finish(step)


def inject_fault(do: str, job: TrainJob) -> None:
    if do == "raise":
        raise ValueError("the loss is not a number")
    if do == "raise_environment":
        print(f"started in {dict(os.environ)}", file=sys.stderr, flush=True)
        raise RuntimeError(f"no answer to a request with {dict(os.environ)}")
    if do == "reset":  # what a healthy rank says some time after its peer has gone
        raise RuntimeError("[gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:1")
    if do == "user":
        raise UserError("Line 7 of data.jsonl is broken.", "Mend it.")
    if do == "memory" and job.plan.layout.micro_batch_size > 1:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
    if do == "full":
        folder = job.checkpoint_dir(99)
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "half"))
    if do == "tell_environment":
        job.output_dir.mkdir(parents=True)
        (job.output_dir / "environment.json").write_text(json.dumps(dict(os.environ)))
    if do == "nap":
        time.sleep(job.settings.engine_options["nap_s"])
    if do == "hang":
        time.sleep(600)
    if do == "exit":
        os._exit(3)
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


class Gloo(Stepper):
    """One real all_reduce over all ranks."""

    def train(self, job: TrainJob) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        job.output_dir.mkdir(parents=True, exist_ok=True)
        (job.output_dir / f"sum-{dist.get_rank()}").write_text(str(value.item()))
        orders = job.settings.engine_options
        if "at" in orders:  # one rank fails while the others wait for it in the collective
            if dist.get_rank() in orders["ranks"]:
                inject_fault(orders["do"], job)
            dist.all_reduce(value)
        dist.destroy_process_group()


class Steps(Stepper):
    """Imitates a torchtune run: it resumes from its checkpoint and exports a model.

    The state of each rank is in each checkpoint, so one that arrives wrong or not whole ends the run.
    """

    def train(self, job: TrainJob) -> None:
        env = RankEnv.read()
        if job.resume_dir is not None:
            for rank in range(env.world_size):
                state = (job.resume_dir / f"state-{rank}.bin").read_bytes()
                if state != b"%d" % job.start_step * 1000:
                    raise ValueError(f"the checkpoint of step {job.start_step} has not rank {rank}'s state")
        super().train(job)
        if env.rank == 0:
            final = job.output_dir / "epoch_0"
            final.mkdir(parents=True)
            for weights in job.model_dir.glob("*.safetensors"):
                shutil.copyfile(weights, final / weights.name)
