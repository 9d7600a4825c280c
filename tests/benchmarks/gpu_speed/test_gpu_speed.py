"""``python -m benchmarks.gpu_speed``: order of runs, result rows, resumption, and a tiny rehearsal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_speed import cases, page
from benchmarks.gpu_speed.__main__ import main
from benchmarks.gpu_speed.cases import ON_GPU, TINY, TRL, TUNE, Run
from benchmarks.gpu_speed.page import Heading
from benchmarks.gpu_speed.session import Results, Session
from benchmarks.gpu_speed.suites import H100, longest, recompute, speed
from benchmarks.on_gpu import cases as memory_cases
from benchmarks.on_gpu.one_run import Outcome
from benchmarks.on_gpu.session import Clock
from tests.benchmarks.on_gpu.machines import H200, plan_of

CASE = cases.in_order(ON_GPU)[0].case
HEADING = Heading(title="Speed", command="c", day="2026-01-01", processor="p", versions={"torch": "2.13.0"})


def measured(**rates: float) -> Results:
    """Results of one case, by engine or peer."""
    names = {"ours": "fsdp2", "trl": TRL, "tune": TUNE}
    outcomes = {
        Run(case=CASE, engine=names[name]).name: Outcome(ended="ran", tokens_per_second=rate)
        for name, rate in rates.items()
    }
    return Results(card="H200", limit={"flops": 8e14, "side": 1, "driver": "1"}, outcomes=outcomes)


def test_every_case_is_run_by_the_first_engine_and_all_peers_before_the_other_engines() -> None:
    runs = cases.in_order(ON_GPU)
    first = [run for run in runs if run.is_peer or run.engine == cases.OURS[0]]
    assert runs[: len(first)] == first
    assert len(set(runs)) == len(runs) == 12 * (len(cases.OURS) + len(cases.PEERS)) - 4  # QLoRA in float8


def test_a_row_is_compared_with_the_fastest_peer_of_its_case() -> None:
    first, *slower_peers = page.rows(cases.in_order(ON_GPU), measured(ours=9000.0, trl=6000.0, tune=7500.0))
    assert (first.engine, first.best_peer, first.ratio) == ("fsdp2", TUNE, pytest.approx(1.2))
    assert {row.ended for row in slower_peers} == {"not measured"}
    assert all(row.ratio is None and row.tokens_per_s is None for row in slower_peers)


def test_the_page_compares_measured_speed_and_memory_with_the_plan() -> None:
    run = cases.in_order(ON_GPU)[0]
    results = measured(ours=9000.0)
    memory_case = memory_cases.in_order(memory_cases.ON_GPUS, H200, "llama-3.1-8b")[0]
    plan = plan_of(memory_case, memory_cases.ON_GPUS, H200)
    results.outcomes[run.name] = Outcome(
        ended="ran", tokens_per_second=9000.0, reserved_bytes=60 * 2**30, plan=plan.to_json()
    )
    row = page.rows([run], results)[0]
    reserved = plan.prediction.memory.counted("reserved")
    assert reserved is not None
    assert row.reserved_gib == 60
    assert row.reserved_gib_predicted == pytest.approx(reserved.likely_bytes / 2**30)
    assert f"| 60.0 | {row.reserved_gib_predicted:.1f} |" in page.render([run], results, HEADING)
    assert row.share_of_limit == pytest.approx(9000 * plan.prediction.flops_per_token / 8e14)
    assert row.tokens_per_s_predicted == plan.prediction.tokens_per_second


def test_finished_runs_are_read_back_and_not_repeated(tmp_path: Path) -> None:
    runs = cases.in_order(TINY)
    results = measured(ours=1.0)
    results.outcomes = {run.name: Outcome(ended="ran", tokens_per_second=1.0) for run in runs[:-1]}
    results.outcomes[runs[0].name] = Outcome(ended="failed")
    path = tmp_path / "gpu_speed.json"
    path.write_text(json.dumps(page.figures(runs, results, HEADING)))
    reloaded = Results.load(path, "H200")
    assert [run for run in runs if not reloaded.is_done(run)] == [runs[0], runs[-1]]
    assert Results.load(path, "another card").outcomes == {}
    messages: list[str] = []
    session = Session(
        suite=speed(TINY, H100),
        folder=tmp_path,
        clock=Clock(0.01),
        results=reloaded,
        say=messages.append,
        keep=lambda: None,
    )
    reloaded.equality = {}
    session.measure(runs)
    assert messages == [f"{run.name}: no time left (expected 40 s)" for run in (runs[0], runs[-1])]


@pytest.mark.parametrize(
    ("suite", "only", "engines"),
    [
        ("speed", "llama-3.1-8b lora 2048", ["fsdp2", *cases.PEERS, *cases.OURS[1:]]),
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
    assert [line.rpartition(", ")[2] for line in text.splitlines() if line.startswith("  ")] == engines
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
