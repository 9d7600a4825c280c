"""Ranks forked from a process that has imported their engine: one second each instead of twelve.

    python -m tests.launchers.engines.ranks ENGINE

reads orders from standard input, a JSON line each: ranks (environment, job files, log), and how many seconds
they may take. It answers with a line of their exit statuses. A rank has the environment of torchrun, which
itself starts those of the tests of the gang and the flows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from launchers.cluster.endpoint import unused_port

ROOT = Path(__file__).parents[3]
_LOOP = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft.tuners.lora.bnb",
    "bitsandbytes",
    "torch._dynamo",
)
TRAINING = {  # what an engine imports before it trains, and while it does
    "torchtune": ("launchers.engines.torchtune.recipe",),
    "deepspeed": ("launchers.engines.deepspeed.sharding", "deepspeed", *_LOOP),
    "fsdp2": ("launchers.engines.fsdp2.sharding", "torch.distributed.fsdp", *_LOOP),
    "trl": ("launchers.engines.trl.trainer", "datasets", *_LOOP),
}


def train(jobs: Sequence[Any], limit_s: float = 300, entry: str = "") -> subprocess.CompletedProcess[str]:
    """Run all ranks of a job to their end; one job per node with separate work folders.

    ``entry``: a function, as module:name, that gets the job in each rank instead of its engine.
    """
    return _train([[job] for job in jobs], limit_s, entry)


def train_in_turn(jobs: Sequence[Any], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run jobs of one engine and one node in turn in the same ranks and process group.

    A job that fails is named in the output, and the next one runs: a gang that has gone out of step is ended
    by the limit.
    """
    return _train([jobs], limit_s)


_SCRIPT = """
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
{code}
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
dist.destroy_process_group()
os._exit(0)  # as launchers.run.worker: gloo's threads may abort a process while the interpreter ends
"""


def run_script(code: str, folder: Path) -> list[Any]:
    """Run Python code in two processes of one gloo group; return the ``result`` of each, as JSON.

    The code finds its own output file in ``sys.argv[1]``.
    """
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "2"}
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **group}
    files = [folder / str(rank) for rank in (0, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT.format(code=code), str(file)],
            env={**env, "RANK": file.name},
            cwd=ROOT,
        )
        for file in files
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(file.read_text()) for file in files]


def _train(
    nodes: Sequence[Sequence[Any]], limit_s: float, entry: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the ranks of all nodes with their jobs to their end."""
    layout = nodes[0][0].plan.layout
    local_world = layout.world_size // len(nodes)
    port = unused_port()
    ranks = []
    for rank in range(layout.world_size):
        node, local_rank = divmod(rank, local_world)
        values = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": layout.world_size,
            "LOCAL_WORLD_SIZE": local_world,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        files = [job.save() for job in nodes[node]]
        ranks.append(
            {
                "environment": {name: str(value) for name, value in values.items()},
                "jobs": [str(file) for file in files],
                "log": str(files[0].with_name(f"rank-{rank}.log")),
                "entry": entry,
            }
        )
    server = _server(nodes[0][0].plan.engine)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({"ranks": ranks, "limit_s": limit_s}) + "\n")
    server.stdin.flush()
    codes = json.loads(server.stdout.readline())
    output = "\n".join(f"{rank['log']}:\n{Path(str(rank['log'])).read_text()}" for rank in ranks)
    return subprocess.CompletedProcess(codes, max(map(abs, codes)), stdout="", stderr=output)


@functools.cache
def _server(engine: str) -> subprocess.Popen[str]:
    """The forking process; it ends when its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launchers.engines.ranks", engine],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for pytest, whose end is its own
    )


def main() -> None:
    engine = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for module in TRAINING[engine]:
        import_module(module)
    for line in sys.stdin:
        order = json.loads(line)
        codes = _wait([_fork(engine, **rank) for rank in order["ranks"]], order["limit_s"])
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _fork(engine: str, environment: dict[str, str], jobs: list[str], log: str, entry: str) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        from launchers import engines
        from launchers.cluster.processes import die_with_parent
        from launchers.gang.job import TrainJob

        die_with_parent(server)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.environ.update(environment)
        if len(jobs) > 1:
            _reuse_process_group()
        module, _, name = entry.partition(":")
        train = getattr(import_module(module), name) if entry else engines.get(engine).train
        code = sum(_failed(train, TrainJob.load(Path(job))) for job in jobs)
    except BaseException:  # noqa: BLE001 the process ends here, whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # as launchers.run.worker: gloo's threads may abort a process while Python takes itself apart


def _failed(train: Callable[[Any], None], job: Any) -> bool:
    try:
        train(job)
    except Exception:  # noqa: BLE001 the next job runs, whatever it was
        print(f"{job.work_dir}:", file=sys.stderr)
        traceback.print_exc()
        return True
    return False


def _reuse_process_group() -> None:
    """Reuse the first process group for all jobs instead of opening new ports and threads."""
    import torch.distributed as dist

    join = dist.init_process_group

    def join_once(*values: Any, **options: Any) -> None:
        if not dist.is_initialized():
            join(*values, **options)

    def stay(*_: Any) -> None:
        gc.collect()  # the job's model goes, and with it what transformers and DeepSpeed know of it

    dist.init_process_group, dist.destroy_process_group = join_once, stay  # type: ignore[assignment]


def _wait(pids: list[int], limit_s: float) -> list[int]:
    """Return the exit statuses; after a failure or timeout the other ranks are killed, as by torchrun."""
    deadline = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
