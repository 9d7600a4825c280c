"""``python -m benchmarks.gpu_speed``: order of runs, result rows, resumption, and a tiny rehearsal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_speed import cases, page, predicted
from benchmarks.gpu_speed.__main__ import _of_card, main
from benchmarks.gpu_speed.cases import COMPILED, ON_GPU, TINY, TRANSFORMERS, TRL, TUNE, Run
from benchmarks.gpu_speed.page import Heading
from benchmarks.gpu_speed.session import SETUP_S, Results, Session, expected_s, runs_within
from benchmarks.gpu_speed.suites import H100, Suite, longest, recompute, small, speed
from benchmarks.gpu_speed.tune import PARENT
from benchmarks.on_gpu.one_run import Outcome
from benchmarks.on_gpu.session import Clock
from estimator.job import Target
from estimator.plan import Plan
from tests.benchmarks.on_gpu.machines import H200

SUITE = speed(ON_GPU, H100)
CASE = SUITE.runs[0].case
HEADING = Heading(title="Speed", command="c", day="2026-01-01", processor="p", versions={"torch": "2.13.0"})


def measured(**rates: float) -> Results:
    """Results of one case, by engine or peer."""
    names = {"ours": "fsdp2", "trl": TRL, "tune": TUNE}
    outcomes = {
        Run(case=CASE, engine=names[name]).name: Outcome(ended="ran", tokens_per_second=rate)
        for name, rate in rates.items()
    }
    return Results(card="H200", limit={"flops": 8e14, "side": 1, "driver": "1"}, outcomes=outcomes)


def session_of(suite: Suite, results: Results, messages: list[str], folder: Path) -> Session:
    """Session without any time left."""
    return Session(
        suite=suite,
        target=Target(machine=H200),
        durations={},
        folder=folder,
        clock=Clock(0),
        results=results,
        say=messages.append,
        keep=lambda: None,
    )


def test_a_model_and_length_is_run_by_the_first_engine_and_peers_before_the_other_engines() -> None:
    runs = cases.in_order(ON_GPU)
    assert len(set(runs)) == len(runs) == 12 * (len(cases.OURS) + len(cases.PEERS)) - 4  # QLoRA in float8
    quarter = len(runs) // 4
    for number, (model, length) in enumerate(
        [("llama-3.1-8b", 2048), ("llama-3.1-8b", 8192), ("qwen3-1.7b", 2048), ("qwen3-1.7b", 8192)]
    ):
        part = runs[number * quarter : (number + 1) * quarter]
        assert {(run.case.model, run.case.seq_len) for run in part} == {(model, length)}
        assert [run.engine for run in part[:9]] == ["fsdp2", TRANSFORMERS, TRL] * 3
        assert {run.engine for run in part[9:15]} == {TUNE, TRANSFORMERS + COMPILED}
    assert [run.case.method for run in runs[:9]] == ["lora"] * 3 + ["full"] * 3 + ["qlora"] * 3


def test_runs_on_a_gpu_have_the_kernels_that_are_the_default_of_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "cc")  # a C compiler, without which nothing is compiled
    target = Target(machine=H200)
    for run in SUITE.runs:
        if run.is_peer or predicted.refusal(run, ON_GPU, target):
            continue
        settings = cases.settings_of(run, ON_GPU, Path("model"), Path("rows"))
        assert (settings.compile, settings.liger) == ("auto", "auto")
        plan = predicted.plan_of(run, ON_GPU, target)
        assert plan.packing
        assert plan.compile, run.name
    suite = small(ON_GPU, H100)
    eager = next(run for run in suite.runs if run.engine == cases.EAGER)
    assert not predicted.plan_of(eager, suite.scale, target).compile


def test_runs_that_cannot_work_are_left_out_with_a_reason() -> None:
    reasons = {run: predicted.refusal(run, ON_GPU, Target(machine=H200)) for run in SUITE.runs}
    for run, reason in reasons.items():
        if run.case.model == "qwen3-1.7b" and run.engine in (TUNE, "torchtune"):
            assert "qwen3" in str(reason)
        elif (run.case.model, run.case.method, run.engine) == ("llama-3.1-8b", "full", "deepspeed"):
            assert "GiB" in str(reason)  # fp32 copies of all weights
        else:
            assert reason is None, run.name


def test_a_run_that_is_left_out_is_a_row_with_the_reason(tmp_path: Path) -> None:
    run = next(run for run in SUITE.runs if (run.case.model, run.engine) == ("qwen3-1.7b", "torchtune"))
    results, messages = measured(), list[str]()
    results.equality = {}
    session_of(SUITE, results, messages, tmp_path).measure([run])
    row = next(row for row in page.rows(SUITE, results) if row.ended == "refused")
    assert (row.case, row.engine) == (run.case.name, "torchtune")
    assert "qwen3" in row.message
    assert len(messages) == 1
    assert not list(tmp_path.iterdir())


def test_a_row_is_compared_with_the_fastest_peer_of_its_case() -> None:
    first, *slower_peers = page.rows(SUITE, measured(ours=9000.0, trl=6000.0, tune=7500.0))
    assert (first.engine, first.best_peer, first.ratio) == ("fsdp2", TUNE, pytest.approx(1.2))
    assert {row.ended for row in slower_peers} == {"not measured"}
    assert all(row.ratio is None and row.tokens_per_s is None for row in slower_peers)


def outcome_on_h200(run: Run) -> Outcome:
    """Outcome of a run on an H200, with a plan whose predictions are those of another day."""
    plan = predicted.plan_of(run, ON_GPU, Target(machine=H200))
    stored = replace(plan, prediction=replace(plan.prediction, tokens_per_second=1.0))
    name, total = H200.gpus[0]
    return Outcome(
        ended="ran",
        tokens_per_second=9000.0,
        reserved_bytes=60 * 2**30,
        device_name=name,
        device_total_bytes=total,
        plan=stored.to_json(),
        seconds=70.0,
    )


def test_the_page_compares_measured_speed_and_memory_with_predictions_of_today() -> None:
    run = SUITE.runs[0]
    results = measured(ours=9000.0)
    results.outcomes[run.name] = outcome_on_h200(run)
    row = page.rows(SUITE, results)[0]
    today = predicted.plan_of(run, ON_GPU, Target(machine=H200)).prediction
    reserved = today.memory.counted("reserved")
    assert reserved is not None
    assert row.reserved_gib == 60
    assert row.reserved_gib_predicted == pytest.approx(reserved.likely_bytes / 2**30)
    assert f"| 60.0 | {row.reserved_gib_predicted:.1f} |" in page.render(SUITE, results, HEADING)
    assert row.share_of_limit == pytest.approx(9000 * today.flops_per_token / 8e14)
    assert row.tokens_per_s_predicted == today.tokens_per_second


def test_predictions_are_those_of_the_measured_layout() -> None:
    run = SUITE.runs[0]
    outcome = outcome_on_h200(run)
    assert outcome.plan is not None
    stored = Plan.from_json(outcome.plan)
    recomputed = replace(stored, layout=replace(stored.layout, activation_checkpointing=True), compile=False)
    plan = predicted.plan_of_today(run, ON_GPU, replace(outcome, plan=recomputed.to_json()))
    assert plan is not None
    assert (plan.layout, plan.compile) == (recomputed.layout, False)
    faster = predicted.plan_of_today(run, ON_GPU, outcome)
    assert faster is not None
    assert faster.prediction.tokens_per_second is not None
    assert plan.prediction.tokens_per_second is not None
    assert plan.prediction.tokens_per_second < faster.prediction.tokens_per_second


def test_the_page_is_written_again_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(ours=9000.0, trl=8000.0)
    results.outcomes[SUITE.runs[0].name] = outcome_on_h200(SUITE.runs[0])
    path = tmp_path / "gpu_speed.json"
    figures = page.figures(SUITE, results, HEADING)
    figures["rows"][0]["tokens_per_s_predicted"] = 1.0
    path.write_text(json.dumps(figures))
    monkeypatch.setattr(sys, "argv", ["gpu_speed", "--rewrite", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    again = json.loads(path.read_text())
    today = predicted.plan_of(SUITE.runs[0], ON_GPU, Target(machine=H200)).prediction.tokens_per_second
    row = again["rows"][0]
    assert (row["tokens_per_s"], row["tokens_per_s_predicted"], row["ratio"]) == (9000, today, 1.125)
    assert (again["day"], again["card"]) == (HEADING.day, "H200")
    assert f"{today:,.0f}" in path.with_suffix(".md").read_text()


def test_results_of_another_card_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "gpu_speed.json"
    assert _of_card(path, "NVIDIA H100 80GB HBM3") == path
    path.write_text(json.dumps(page.figures(SUITE, measured(ours=1.0), HEADING)))
    assert _of_card(path, "H200") == path
    assert _of_card(path, "NVIDIA H100 80GB HBM3").name == "gpu_speed_nvidia_h100_80gb_hbm3.json"


def test_expected_durations_are_those_of_runs_that_compile_as_well() -> None:
    ours, trainer = (Run(case=CASE, engine=engine) for engine in ("fsdp2", TRANSFORMERS))
    outcomes = {
        ours.name: Outcome(ended="ran", seconds=90.0),
        trainer.name: Outcome(ended="ran", seconds=45.0),
        Run(case=CASE, engine="deepspeed").name: Outcome(ended="failed", seconds=500.0),
    }
    assert expected_s(Run(case=CASE, engine=TUNE), outcomes) == 90
    assert expected_s(Run(case=replace(CASE, model="qwen3-1.7b"), engine=TRL), outcomes) == 45
    minutes = (SETUP_S + 90 + 45 + 45 + 89) / 60
    assert runs_within(minutes, SUITE.runs, outcomes) == 3


def test_finished_runs_are_read_back_and_failed_ones_come_last(tmp_path: Path) -> None:
    suite = speed(TINY, H100)
    runs = suite.runs
    results = measured(ours=1.0)
    results.outcomes = {run.name: Outcome(ended="ran", tokens_per_second=1.0) for run in runs[:-1]}
    results.outcomes[runs[0].name] = Outcome(ended="failed")
    path = tmp_path / "gpu_speed.json"
    path.write_text(json.dumps(page.figures(suite, results, HEADING)))
    reloaded = Results.load(path, "H200")
    assert [run for run in runs if not reloaded.is_done(run)] == [runs[0], runs[-1]]
    assert Results.load(path, "another card").outcomes == {}
    reloaded.equality = {}
    messages: list[str] = []
    session_of(suite, reloaded, messages, tmp_path).measure(runs)
    # the duration of the other runs is unknown in this file: 0 s
    assert messages == [f"{run.name}: no time left (expected 0 s)" for run in (runs[-1], runs[0])]


def test_torchtunes_command_ends_with_the_process_that_started_it() -> None:
    """Without its parent, here one that is not its parent, it would keep the GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu_speed.tune", "ls"]
    orphan = subprocess.run(command, env={**os.environ, PARENT: "1"}, capture_output=True, check=False)
    assert orphan.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("suite", "only", "engines"),
    [
        ("speed", "llama-3.1-8b lora 2048", [run.engine for run in SUITE.runs if run.case == CASE]),
        ("small", "smollm2-135m lora", ["fsdp2", "fsdp2 eager", "deepspeed", "torchtune"]),
        ("tasks", "llama-3.2-1b", ["fsdp2"] * 4 + ["trl"]),
        ("recompute", "llama-3.1-8b lora", list(cases.RECOMPUTED)),
    ],
)
def test_a_dry_run_lists_the_runs_on_any_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suite: str,
    only: str,
    engines: list[str],
) -> None:
    arguments = ["--dry-run", "--only", only, "--suite", suite, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_speed", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    rows = [line.partition(" (")[0] for line in text.splitlines() if line.startswith("  ")]
    assert [row.rpartition(", ")[2] for row in rows] == engines
    assert re.search(r"about \d+ of them fit in 8 minutes", text)
    assert not list(tmp_path.iterdir())


def test_recomputing_runs_differ_in_what_they_recompute(tmp_path: Path) -> None:
    layouts = set()
    for run in recompute(TINY, H100).runs:
        settings = cases.settings_of(run, TINY, tmp_path, tmp_path / "rows.jsonl", None)
        assert settings.activation_checkpointing is True
        layouts.add((settings.recompute.what, settings.recompute.every))
    assert layouts == {("selective", "auto"), ("full", "auto"), ("full", 2)}


def test_the_longest_sequences_are_around_the_longest_that_fits() -> None:
    lengths: dict[str, list[int]] = {"lora": [], "full": []}
    for run in longest(ON_GPU, H100).runs:
        lengths[run.case.method].append(run.case.seq_len)
    assert lengths["lora"][0] > lengths["full"][0] > 4096  # the planned ones, which are run first
    for first, *neighbors in lengths.values():
        assert min(neighbors) < first < max(neighbors)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("suite", "only"), [("tasks", "dpo"), ("longest", "lora 128"), ("small", "eager lora")]
)
def test_a_tiny_rehearsal_of_a_suite_compares_speed_with_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, only: str
) -> None:
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    argv = ["gpu_speed", "--tiny", "--suite", suite, "--only", only, "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "out" / f"gpu_speed_{suite}_tiny.json").read_text())
    assert [row["ended"] for row in figures["rows"] if row["ended"] != "not measured"] == ["ran"]
    assert figures["peers"] == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_tiny_rehearsal_measures_this_package_and_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    for case_name in ("lora fsdp2", "lora CLI"):
        argv = ["gpu_speed", "--tiny", "--minutes", "9", "--only", case_name, "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    figures = json.loads((tmp_path / "out" / "gpu_speed_tiny.json").read_text())
    row = figures["rows"][0]
    assert (row["ended"], row["best_peer"]) == ("ran", TUNE)
    assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["best_peer_tokens_per_s"])
    assert figures["equality"]["equal"]
