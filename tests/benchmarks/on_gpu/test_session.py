"""Execution of all cases: within the time limit, each run in its own process, without leftovers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.on_gpu import cases, data
from benchmarks.on_gpu.cases import ON_CPU
from benchmarks.on_gpu.one_run import Order, Outcome
from benchmarks.on_gpu.search import Found
from benchmarks.on_gpu.session import Clock, Measured, Session, run_apart
from estimator.job import Machine
from launchers.models import tiny_llama

ALONE = Machine(cpu_cores=2, ram_bytes=2**34, disk_free_bytes=2**40)
FULL = next(case for case in cases.in_order(ON_CPU, ALONE) if case.what == "tiny-llama full torchtune")


def order(folder: Path, limit_bytes: int | None = None) -> Order:
    model = tiny_llama.make(folder / "tiny-llama")
    rows = data.write(folder / "rows.jsonl", model, cases.rows_needed(FULL, ON_CPU), ON_CPU.seq_len)
    return Order(
        settings=cases.settings_of(FULL, ON_CPU, model, rows).model_dump(mode="json"),
        warm_up=ON_CPU.warm_up,
        folder=folder / "run",
        data=folder / "data",
        limit_bytes=limit_bytes,
    )


def alive(folder: Path) -> list[str]:
    """Return processes whose command line contains the folder."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [" ".join(command) for command in commands if any(str(folder) in word for word in command)]


def test_a_case_without_remaining_time_is_skipped_and_named(tmp_path: Path) -> None:
    counts: list[int] = []

    def keep(measured: Sequence[Measured]) -> None:
        counts.append(len(measured))

    session = Session(
        scale=ON_CPU, folder=tmp_path, clock=Clock(0.1), resolution=0.1, say=lambda _: None, keep=keep
    )
    every = session.measure(cases.in_order(ON_CPU, ALONE, "smollm2-135m")[:6])
    refused = every.pop(2)  # QLoRA by torchtune
    assert [each.left_out for each in every] == ["no time was left to run it"] * 5
    assert "NF4 needs matrices" in refused.left_out
    assert counts == [6] * 6, "results are kept after each case"
    assert list(tmp_path.iterdir()) == []


def test_the_needed_memory_is_unknown_without_an_nvml_peak() -> None:
    outcome = Outcome(ended="ran", reserved_bytes=900, device_bytes=20)
    interval = Found(runs_bytes=800, fails_bytes=790, trials=3, finished=True)
    measured = Measured(case=FULL, outcome=outcome, found=interval)
    assert measured.device_missed
    assert (measured.device_bytes, measured.outside_bytes, measured.needed_bytes) == (None, None, None)


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    outcome = run_apart(order(tmp_path), 4.0)
    assert (outcome.ended, outcome.message) == ("no time", "ended after 4 s")
    deadline = time.monotonic() + 60
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive(tmp_path) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_under_too_low_a_limit_runs_out_of_memory_and_has_no_machine(tmp_path: Path) -> None:
    outcome = run_apart(order(tmp_path, limit_bytes=430 * 2**20), 300)
    assert outcome.ended == "out of memory", outcome.message
    assert not outcome.message.startswith("rank")
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_an_invalid_setting_is_refused_with_the_reason(tmp_path: Path) -> None:
    train_order = order(tmp_path)
    train_order.settings["seq_len"] = 4096
    outcome = run_apart(train_order, 300)
    assert outcome.ended == "refused"
    assert "longer than the 2048 tokens" in outcome.message
