"""The report on the terminal."""

from __future__ import annotations

import pytest

from checklist.outputs.terminal import MAX_RANKS, show
from checklist.verdict import judge
from tests.checklist.runs import cpu_run, gpu_run


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("COLUMNS", "160")

    def text(run: object) -> str:
        show(judge(run))  # type: ignore[arg-type]
        return capsys.readouterr().out

    return text


def test_measurements_are_shown_next_to_verdicts_and_each_gpu_has_a_row(shown: object) -> None:
    text = shown(gpu_run(1, 4, probes=(), pairs=()))  # type: ignore[operator]
    lines = text.splitlines()
    gemm = next(line for line in lines if line.startswith("gemm"))
    assert "PASS" in gemm
    assert gemm.rstrip().endswith("gemm_bf16 760 to 763 TFLOPS (at least 731)")
    assert any(line.split() == ["2", "host-0", "763", "2861", "1730", "690", "62"] for line in lines)
    assert "Software works; " in text
    assert "  $ torchrun --nnodes 2 --nproc-per-node 4 " in text


def test_measurements_on_cpus_are_shown(shown: object) -> None:
    text = shown(cpu_run(2, local=True))  # type: ignore[operator]
    assert "PASS: Software works; speed not judged: all nodes are on this one machine. (60 s)" in text
    for figure in ("gemm_fp32 0.2 TFLOPS", "barrier latency 70 µs", "all_reduce fp32 ", "pairs, median "):
        assert figure in text


def test_large_runs_list_no_ranks_and_runs_on_several_machines_suggest_no_next_command(shown: object) -> None:
    text = shown(gpu_run(1 + MAX_RANKS // 8, 8))  # type: ignore[operator]
    assert "rank  node" not in text
    assert "gemm_bf16 760 to 763 TFLOPS" in text
    assert "torchrun" not in text
