"""Run several ranks with NCCL on one GPU.

    python -m benchmarks.on_gpu.shared [--nccl libnccl.so.2] [--only WORDS] [--out FOLDER]
    python -m benchmarks.on_gpu.shared --device cpu      # the same with gloo
    python -m benchmarks.on_gpu.shared --dry-run         # commands and requirements, on any machine

NCCL 2.30 and later allow several ranks on one GPU with NCCL_MULTI_RANK_GPU_ENABLE=1 (experimental).
``--nccl`` preloads such a library under the installed torch. Parts: the checklist with two ranks; training
with one and with two ranks, whose losses are compared; and, as root, the checklist on four network namespaces
with faults. Each part is a row of shared_gpu_DEVICE.json in ``--out``; NCCL's logs and those of the parts are
in the folder shared_gpu_DEVICE next to it. Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.network_faults import WORLD, wait_until
from checklist.result import read
from estimator.errors import UserError
from launchers.cluster.endpoint import unused_port
from launchers.models import tiny_llama
from tests.checklist import netns
from tests.checklist.netns import BridgedHosts

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
ENGINES = ("fsdp2", "deepspeed")
HOSTS = 4
STEPS = 12
CLOSE = {"cuda": 1e-2, "cpu": 1e-4}  # relative difference of losses: bf16, fp32
# Rates of a host's link and of a slow one; all namespaces share one machine's processors
RATES = {"cuda": ("4gbit", "1gbit"), "cpu": ("200mbit", "50mbit")}
NCCL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_VISIBLE_DEVICES": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "200",
}
LONGER = {"cuda": 1, "cpu": 4}  # factor on the time limits
SKIPPED = "datastore,storage,host-settings"
TRAINING = {
    "max_steps": STEPS,
    "seq_len": 128,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "checkpoint_every": STEPS + 1,
    "evaluation.fraction": 0,
    "evaluation.generations": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One row of the results. ``ranks`` are processes, one on each simulated node."""

    name: str
    ranks: int
    limit_s: float
    engine: str = ""  # of training; otherwise the checklist runs
    fault: Callable[[BridgedHosts, str], object] | None = None  # on namespaces, with the rate of a slow link
    strike: Callable[[BridgedHosts, int], object] | None = (
        None  # during the collectives, with the worker of host 2
    )
    arguments: tuple[str, ...] = ()
    expected: str = ""

    @property
    def on_hosts(self) -> bool:
        """Whether the ranks are in separate network namespaces."""
        return self.fault is not None


@dataclass(kw_only=True, slots=True)
class Row:
    """Result of one part."""

    part: str
    expected: str
    seconds: float = 0.0
    statuses: list[int] = field(default_factory=list)  # exit statuses by rank
    verdict: str | None = None
    findings: list[str] = field(default_factory=list)
    backend: str | None = None
    losses: list[float] = field(default_factory=list)
    problem: str = ""


def _nothing(_bed: BridgedHosts, _slow: str) -> None:
    """Leave the hosts as they are."""


def _signal(number: signal.Signals) -> Callable[[BridgedHosts, int], object]:
    """Return an action that sends a signal to a rank."""
    return lambda _bed, worker: os.kill(worker, number)


def _unplug(bridged_hosts: BridgedHosts, _worker: int) -> None:
    """Take away the carrier of a host."""
    netns.do("ip", "link", "set", bridged_hosts.bridge_port(2), "down")


def parts() -> list[Part]:
    """List the parts, the most useful first."""
    training = [
        Part(name=f"train {engine} on {ranks}", ranks=ranks, limit_s=120, engine=engine, expected="ends")
        for engine in ENGINES
        for ranks in (1, 2)
    ]
    cases: list[tuple[str, Callable[[BridgedHosts, str], object], tuple[str, ...], str]] = [
        ("healthy", _nothing, (), "no FAIL but equal GPU identifiers"),
        (
            "slow host",
            lambda bridged_hosts, slow: bridged_hosts.slow(2, slow),
            (),
            "h2 slow in both directions",
        ),
        (
            "sends slowly",
            lambda bridged_hosts, slow: bridged_hosts.slow(2, slow, receives=False),
            (),
            "h2 sends slowly",
        ),
        ("loses 3 %", lambda bridged_hosts, _slow: bridged_hosts.lose(2, 0.03), (), "loss at h2"),
    ]
    strikes: list[tuple[str, Callable[[BridgedHosts, int], object], str]] = [
        ("rank hangs", _signal(signal.SIGSTOP), "rank 2 hung"),
        ("rank dies", _signal(signal.SIGKILL), "rank 2 died"),
        ("carrier lost", _unplug, "h2 lost"),
    ]
    return [
        Part(
            name="checklist on 2",
            ranks=2,
            limit_s=90,
            arguments=("--skip", f"{SKIPPED},interface,hostname"),  # both ranks have this host's name
            expected="no FAIL but equal GPU identifiers",
        ),
        *training,
        *(
            Part(
                name=f"hosts, {name}",
                ranks=HOSTS,
                limit_s=90,
                fault=fault,
                arguments=options,
                expected=expected,
            )
            for name, fault, options, expected in cases
        ),
        *(
            Part(
                name=f"hosts, {name}",
                ranks=HOSTS,
                limit_s=90,
                fault=_nothing,
                strike=strike,
                arguments=WORLD,
                expected=expected,
            )
            for name, strike, expected in strikes
        ),
    ]


def environment(device: str, nccl: Path | None, rank: int, *, hosts: bool) -> dict[str, str]:
    """Return the variables of a rank; on namespaces, data goes over sockets."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    values = dict(NCCL)
    if hosts:
        values |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
        values |= {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    return values | ({} if nccl is None else {"LD_PRELOAD": str(nccl)})


def torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables of torchrun with one process on each of several nodes."""
    job = f"shared-{port}"
    return {
        "RANK": str(rank),
        "GROUP_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": job,
        "CHECKLIST_SECRET": job,
        "CHECKLIST_HOST_ID": f"host-{rank}",
        "NODE_NAME": f"h{rank}",
    }


def command(part: Part, device: str, folder: Path, rank: int) -> list[str]:
    """Return the command of one rank."""
    if part.engine:
        values = {
            "model": str(folder.parent / "tiny-llama"),
            "engine": part.engine,
            "output_dir": str(folder / "out"),
            "resources.device": device,
            "resources.nodes": part.ranks,
            "resources.gpus": 1,
            **TRAINING,
        }
        changes = [each for name, value in values.items() for each in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "launchers", "--no-calibration", *changes]
    options = ["--device", device, "--skip", SKIPPED, *part.arguments]  # several --skip add up
    files = ["--keep", str(folder / f"host{rank}"), "--json", str(folder / f"result{rank or ''}.json")]
    return [sys.executable, "-m", "checklist", *options, *files]


def run(part: Part, device: str, nccl: Path | None, folder: Path) -> Row:
    """Run a part; every failure is a row."""
    row, begin = Row(part=part.name, expected=part.expected), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        row.statuses = (
            _on_hosts(part, device, nccl, folder) if part.on_hosts else _here(part, device, nccl, folder)
        )
    except (OSError, RuntimeError) as error:
        row.problem = " ".join(str(error).split())[:300]
    row.seconds = round(time.monotonic() - begin, 1)
    file = folder / "result.json"
    if part.engine:
        row.losses = losses(folder / "out")
    elif file.is_file():
        result = read(file)
        row.verdict, row.backend = result.verdict, result.measurements.backend
        row.findings = [f"{each.verdict} {each.check}: {each.title}" for each in result.findings]
    if any(row.statuses) and not row.verdict and not row.problem:
        row.problem = _last_line(folder / "rank0.txt")
    return row


def _here(part: Part, device: str, nccl: Path | None, folder: Path) -> list[int]:
    """Run the ranks on this machine and return their exit statuses; -9 for those ended at the limit."""
    port, processes = unused_port(), []
    for rank in range(part.ranks):
        variables = environment(device, nccl, rank, hosts=False) | torchrun(rank, part.ranks, port)
        variables["FINETUNE_WORK_DIR"] = str(folder / f"work{rank}")
        with (folder / f"rank{rank}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command(part, device, folder, rank),
                    cwd=ROOT,
                    env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    limit = time.monotonic() + part.limit_s * LONGER[device]
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, limit - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [process.returncode for process in processes]


def _on_hosts(part: Part, device: str, nccl: Path | None, folder: Path) -> list[int]:
    """Run the checklist on namespaces and return the exit statuses."""
    fast, slow = RATES[device]
    assert part.fault is not None
    with netns.bridged_hosts(part.ranks, fast) as bridged_hosts:
        part.fault(bridged_hosts, slow)
        variables = {
            rank: environment(device, nccl, rank, hosts=True)
            | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
            | {"GROUP_WORLD_SIZE": str(part.ranks)}
            for rank in range(part.ranks)
        }
        options = ("--device", device, "--skip", SKIPPED, *part.arguments)
        job = bridged_hosts.start(folder, *options, environment=variables)
        if part.strike is not None:
            worker = wait_until(bridged_hosts, job, "collectives")
            if worker is None:
                raise RuntimeError("the run ended before its collectives, without the fault")
            part.strike(bridged_hosts, worker)
        return job.wait(part.limit_s * LONGER[device])


def losses(output: Path) -> list[float]:
    """Return the losses of a finished training by step."""
    file = output / "metrics.json"
    if not file.is_file():
        return []
    return [step["loss"] for step in json.loads(file.read_text())["steps"] if step["loss"] is not None]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][:300] if lines else "no output"


def compared(rows: Mapping[str, Row], device: str) -> list[str]:
    """Compare the losses of two ranks with those of one, by engine."""
    lines = []
    for engine in ENGINES:
        one, two = (rows.get(f"train {engine} on {ranks}") for ranks in (1, 2))
        if one is None or two is None or not one.losses or len(one.losses) != len(two.losses):
            continue
        difference = max(abs(a / b - 1) for a, b in zip(one.losses, two.losses, strict=True))
        word = "equal" if difference <= CLOSE[device] else "DIFFERENT"
        lines.append(f"{engine}: losses of 2 ranks and of 1 are {word}, largest difference {difference:.1e}")
    return lines


def chosen(only: str | None) -> list[Part]:
    """Select the parts whose name has every word of ``only``. Raises UserError if none has."""
    words = (only or "").split()
    matches = [part for part in parts() if all(word in part.name.replace(",", "").split() for word in words)]
    if not matches:
        raise UserError(f"--only {only}: no part has all these words.", f"One part is: {parts()[0].name}")
    return matches


def dry_run(selected: Sequence[Part], options: argparse.Namespace) -> None:
    """Print requirements and the commands of rank 0."""
    print(f"network namespaces: {netns.missing() or 'available'}")
    if options.device == "cuda":
        print(f"GPU: {', '.join(describe()['gpus']) or 'none found'}")
        print(f"NCCL: {options.nccl or 'the one of torch, which must be 2.30 or later'}")
    for part in selected:
        folder = options.out / f"shared_gpu_{options.device}" / part.name.replace(" ", "-").replace(",", "")
        variables = environment(options.device, options.nccl, 0, hosts=part.on_hosts)
        line = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"{part.name} ({part.ranks} ranks, at most {part.limit_s:.0f} s; expected: {part.expected})")
        print(f"  {line} {shlex.join(command(part, options.device, folder, 0))}")


def main() -> None:
    """Run ``python -m benchmarks.on_gpu.shared``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu.shared",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo (default: cuda)")
    parser.add_argument("--nccl", type=Path, help="NCCL library to preload: 2.30 or later")
    parser.add_argument("--only", help="words of a part's name: 'train fsdp2'")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the whole (default: 8)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, on any machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    try:
        selected = chosen(options.only)
        if options.dry_run:
            dry_run(selected, options)
            return
        _measure(selected, options)
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _measure(selected: Sequence[Part], options: argparse.Namespace) -> None:
    """Run what is missing in the results. Raises UserError without a GPU or its library."""
    if options.device == "cuda" and not describe()["gpus"]:
        raise UserError("No NVIDIA GPU is found by its driver (NVML).", "Use --device cpu or --dry-run.")
    if options.nccl is not None and not options.nccl.is_file():
        raise UserError(f"--nccl {options.nccl} is not a file.", "Give the path of libnccl.so.2.")
    logs = options.out / f"shared_gpu_{options.device}"
    logs.mkdir(parents=True, exist_ok=True)
    file = logs.with_suffix(".json")
    stored = json.loads(file.read_text())["rows"] if file.is_file() else []
    rows = {values["part"]: Row(**values) for values in stored}
    limit = time.monotonic() + 60 * options.minutes
    if any(part.engine for part in selected):
        tiny_llama.make(logs / "tiny-llama")
    for part in selected:
        if part.name in rows and not rows[part.name].problem:
            continue
        why = netns.missing() if part.on_hosts else None
        if why is not None or time.monotonic() + part.limit_s * LONGER[options.device] > limit:
            print(f"{part.name}: {why or 'no time left'}", flush=True)
            continue
        folder = logs / part.name.replace(" ", "-").replace(",", "")
        row = rows[part.name] = run(part, options.device, options.nccl, folder)
        print(f"{part.name}: {row.statuses} {row.verdict or row.losses[-1:]} ({row.seconds} s) {row.problem}")
        for finding in row.findings:
            print(f"  {finding}", flush=True)
        record: dict[str, Any] = {"machine": describe(), "rows": [asdict(each) for each in rows.values()]}
        file.write_text(json.dumps(record, indent=1) + "\n")
    for line in compared(rows, options.device):
        print(line)


if __name__ == "__main__":
    main()
