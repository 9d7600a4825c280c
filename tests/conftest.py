"""Fixtures shared by several test folders."""

from __future__ import annotations

import csv
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import selection
from tests.lab import control_plane as lab

# The longest first, by seconds measured: a file that is begun last keeps the other workers waiting.
LONGEST = (
    "kubernetes/test_on_a_control_plane.py",
    "flows/test_finetune_flow.py",
    "batch/test_on_batch.py",
    "batch/test_faults.py",
    "flows/test_finetune_flow_faults.py",
    "checklist/run/test_run_faults.py",
    "flows/test_checklist_flow.py",
    "kubernetes/test_faults.py",  # late enough that two control planes, busy when idle, rarely run at once
    "flows/test_finetune_flow_of_images.py",
    "launchers/gang/test_gang_faults.py",
    "flows/cluster_check/test_suspicions.py",
    "slurm/test_slurm.py",
    "infra/test_planner_page.py",
    "infra/test_aws.py",
    "decorators/test_gpu_profile.py",
    "flows/test_finetune_flow_out_of_memory.py",
    "kubernetes/test_checklist_faults.py",
    "test_docs.py",
    "launchers/engines/torchtune/test_recipe.py",
    "flows/test_finetune_flow_card.py",
)

# What a process that launches a run leaves in its environment, for those that it starts.
LEFT_BY_LAUNCHES = (
    "FINETUNE_PLAN",
    "FINETUNE_STAGED",
    "FINETUNE_STEP_ENVIRONMENT",
    "FINETUNE_CLUSTER",
    "CHECKLIST_LAUNCH",
    "FINETUNE_LOG",  # set by --log-level
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the number of workers
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Set ``-m`` and ``-n`` if the command line does not."""
    option = config.option
    if not any(str(each).startswith("-m") for each in config.invocation_params.args):
        option.markexpr = selection.default_marks(config.args)
    is_worker = hasattr(config, "workerinput")  # reads the command line again, and starts no workers
    if not is_worker and getattr(option, "numprocesses", 0) is None:
        option.numprocesses = 0 if option.usepdb else selection.default_workers(config.args)


def pytest_configure() -> None:
    """Set up all test processes: Ctrl-C, compiled modules, idle threads, a cache folder."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of Pythons would compile everything again
    sys.dont_write_bytecode = False
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # torch's threads would spin on cores of other workers
    # Metaflow's default is one folder for all users of a machine, which only the first of them can write.
    cache = Path(tempfile.gettempdir(), f"metaflow-client-{os.getuid()}")
    os.environ.setdefault("METAFLOW_CLIENT_CACHE_PATH", str(cache))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Stop the garbage collector while tests are collected: half of the CPU time (28 s, now 14)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # modules and items stay until the end
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module without slow tests if only slow tests run."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and selection.only_slow(config.option.markexpr):
        return None if selection.names_slow(collection_path) else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files: ``LONGEST`` first, then those with slow tests, then all others."""
    folder = Path(__file__).parent
    ranks = {folder / name: rank for rank, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    if unnamed := [str(path) for path in slow if not selection.names_slow(path)]:
        raise pytest.UsageError(f"Write pytest.mark.slow in {', '.join(unnamed)}: pytest -m slow skips them.")
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), item.path not in slow))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured output: pytest-xdist ends a worker whose report is not UTF-8."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections
    ]
    return report


def write_sums(path: Path) -> Path:
    """Write sixty rows of arithmetic that a tiny model can start to learn in a few steps.

    The suffix is the form: ``.jsonl`` of Alpaca's rows, ``.csv`` with semicolons, ``.parquet`` of messages,
    ``.json`` a list of ShareGPT's chats. All become the same tokens.
    """
    rows = [
        {"instruction": "Add the two numbers.", "input": f"{a} and {b}", "output": f"The sum is {a + b}."}
        for a in range(1, 7)
        for b in range(10)
    ]
    prompts_with_answers = [(f"{row['instruction']}\n\n{row['input']}", row["output"]) for row in rows]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=";").writerows([["prompt", "completion"], *prompts_with_answers])
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        roles = ("user", "assistant")
        chats = [
            [{"role": role, "content": text} for role, text in zip(roles, row, strict=True)]
            for row in prompts_with_answers
        ]
        parquet.write_table(pyarrow.table({"messages": chats}), path)
    elif path.suffix == ".json":
        turns = [
            [{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in prompts_with_answers
        ]
        path.write_text(json.dumps([{"conversations": each} for each in turns], indent=2))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_images(folder: Path, count: int = 20, side: int = 600) -> Path:
    """Write a folder of plain images with captions, in the format of ``datasets``."""
    from PIL import Image

    folder.mkdir()
    rows = [{"file_name": f"{number}.png", "text": f"grey {number}"} for number in range(count)]
    for number, row in enumerate(rows):
        Image.new("L", (side, side), number).convert("RGB").save(folder / row["file_name"])
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_pairs(path: Path) -> Path:
    """Write the same questions, with the chosen answer in lower case and the rejected one in capitals."""
    rows = [json.loads(line) for line in write_sums(path).read_text().splitlines()]
    pairs = [
        {key: row[key] for key in ("instruction", "input")}
        | {"chosen": row["output"], "rejected": row["output"].upper()}
        for row in rows
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "sums.jsonl")


@pytest.fixture(autouse=True)
def no_earlier_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide measurements of earlier runs on this machine from tests."""
    monkeypatch.setenv("FINETUNE_CALIBRATION", str(tmp_path_factory.getbasetemp() / "earlier-runs.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # refreshed prices
    monkeypatch.delenv("FINETUNE_HARDWARE", raising=False)
    for name in LEFT_BY_LAUNCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")  # not of the session: a server without work takes time of a core, too
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.ControlPlane]:
    """A Kubernetes API server on this machine with its controllers and scheduler, and JobSet's definition.

    It has no nodes. Users beside the administrator: "launcher" of the group finetune-launchers, and "alice".
    A test takes a namespace of its own, and leaves the server running.
    """
    if reason := lab.missing():
        pytest.skip(reason)
    users = {"launcher": ("finetune-launchers",), "alice": ()}
    with lab.ControlPlane(tmp_path_factory.mktemp("control-plane"), users=users) as started:
        yield started
