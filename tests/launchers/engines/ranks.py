"""Ranks forked from a process that has imported their engine: one second each instead of twelve.

    python -m tests.launchers.engines.ranks

imports what engines share, and reads orders from standard input, a JSON line each: the imports (a key of
``TRAINING``), ranks (environment, job files, log), and how many seconds they may take. For each key it forks
one process that imports the rest and starts the ranks. The response is a line with the exit statuses. A rank
has the environment of torchrun, which itself starts the ranks in the tests of the gang and the flows.
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
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO
from unittest import mock

from launchers.cluster.endpoint import unused_port
from launchers.cluster.processes import die_with_parent
from launchers.precompute import parts

ROOT = Path(__file__).parents[3]
_one_order = threading.Lock()
DIFFUSERS = ("diffusers.models.unets.unet_2d_condition", "diffusers.schedulers.scheduling_ddpm")
_SHARED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft.tuners.lora.bnb",
    "bitsandbytes",
    "torch._dynamo",
    "torch.profiler",
    "deepspeed",  # which accelerate imports, too, when it saves a model or generates
    "torchdata.stateful_dataloader",
)
TRAINING = {  # what an engine imports before and during training, in addition to _SHARED
    "torchtune": ("launchers.engines.torchtune.recipe",),
    "deepspeed": ("launchers.engines.deepspeed.sharding", "launchers.engines.loop.train"),
    "fsdp2": ("launchers.engines.fsdp2.sharding", "launchers.engines.loop.train", "torch.distributed.fsdp"),
    "scripts": (),
    "images": ("launchers.engines.fsdp2.sharding", "torch.distributed.fsdp", *DIFFUSERS),
    "trl": ("launchers.engines.trl.trainer", "datasets"),
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
"""


def run_script(code: str, folder: Path) -> list[Any]:
    """Run Python code in two processes of one gloo group; return the ``result`` of each, as JSON.

    The code finds its own output file in ``sys.argv[1]``.
    """
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "2"}
    files = [folder / str(rank) for rank in (0, 1)]
    ranks = [
        {
            "environment": group | {"RANK": file.name},
            "script": _SCRIPT.format(code=code),
            "arguments": [str(file)],
            "log": str(file.with_suffix(".log")),
        }
        for file in files
    ]
    codes, output = _run("scripts", "", ranks, limit_s=120)
    assert codes == [0, 0], output
    return [json.loads(file.read_text()) for file in files]


@contextlib.contextmanager
def _started(module: str, request: Path, log: Path, **_: Any) -> Iterator[Any]:
    script = f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    rank = {"environment": {}, "script": script, "arguments": [str(request)], "log": str(log)}
    (code,), _output = _run("scripts", "", [rank], limit_s=300)
    yield SimpleNamespace(poll=lambda: code, returncode=code)


def forked_processes(module: ModuleType = parts) -> Any:
    """Return a context in which ``started`` of a module runs its process as a fork, which has torch imported.

    The process has ended when ``started`` returns it.
    """
    return mock.patch.object(module, "started", _started)


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
    job = nodes[0][0]
    imports = "images" if job.settings.task == "text-to-image" else job.plan.engine
    codes, output = _run(imports, job.plan.engine, ranks, limit_s)
    return subprocess.CompletedProcess([imports], max(map(abs, codes)), stdout="", stderr=output)


def _run(imports: str, engine: str, ranks: Sequence[dict[str, Any]], limit_s: float) -> tuple[list[int], str]:
    """Run ranks or scripts to their end; return their exit statuses and their output."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    order = {"imports": imports, "engine": engine, "ranks": ranks, "limit_s": limit_s}
    with _one_order:
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
    return codes, "\n".join(f"{rank['log']}:\n{Path(rank['log']).read_text()}" for rank in ranks)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the forking process; it ends when its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launchers.engines.ranks"],
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
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of imports is no response
    for module in _SHARED:
        import_module(module)
    forked: dict[str, tuple[TextIO, TextIO]] = {}
    for line in sys.stdin:
        imports = json.loads(line)["imports"]
        if imports not in forked:
            forked[imports] = _fork_server(TRAINING[imports])
        orders, codes = forked[imports]
        orders.write(line)
        orders.flush()
        responses.write(codes.readline())
        responses.flush()


def _fork_server(modules: Sequence[str]) -> tuple[TextIO, TextIO]:
    """Fork a process that imports ``modules`` and starts ranks; return its input and its output."""
    (its_input, orders), (codes, its_output) = os.pipe(), os.pipe()
    parent = os.getpid()
    if os.fork():
        os.close(its_input)
        os.close(its_output)
        return os.fdopen(orders, "w"), os.fdopen(codes)
    die_with_parent(parent)
    for module in modules:
        import_module(module)
    with os.fdopen(its_input) as lines, os.fdopen(its_output, "w") as responses:
        for line in lines:
            order = json.loads(line)
            pids = [_fork(order["engine"], **rank) for rank in order["ranks"]]
            responses.write(json.dumps(_wait(pids, order["limit_s"])) + "\n")
            responses.flush()
    os._exit(0)


def _fork(engine: str, environment: dict[str, str], log: str, **work: Any) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(server)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.environ.update(environment)
        code = _train_jobs(engine, **work) if "jobs" in work else _run_code(**work)
    except BaseException:  # noqa: BLE001 the process ends here, whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # as launchers.run.worker: gloo's threads may abort a process while the interpreter ends
    os._exit(code)


def _train_jobs(engine: str, jobs: list[str], entry: str) -> int:
    from launchers import engines
    from launchers.gang.job import TrainJob

    if len(jobs) > 1:
        _reuse_process_group()
    module, _, name = entry.partition(":")
    train = getattr(import_module(module), name) if entry else engines.get(engine).train
    return sum(_failed(train, TrainJob.load(Path(job))) for job in jobs)


def _run_code(script: str, arguments: list[str]) -> int:
    sys.argv[1:] = arguments
    exec(script, {"__name__": "__main__"})  # noqa: S102 the code of a test
    return 0


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
