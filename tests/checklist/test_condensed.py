"""The condensed result of a large run keeps all findings."""

from __future__ import annotations

import dataclasses

from checklist import past_runs, result
from checklist.condensed import MAX_FIGURES, condensed_run
from checklist.measurements import Local
from checklist.outputs.figures import by_rank, of_check
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, mesh, verdict_of

NODES = 130
HEALTHY = gpu_run(NODES)
COPIES = tuple(
    Local(rank=rank, what="peer_copy", value=370.0 - peer, unit="GB/s", samples=(1.0,) * 9, peer=peer)
    for rank in range(NODES * 8)
    for peer in (1, 2)
)
SLOW = tuple(
    dataclasses.replace(x, value=600.0 + x.rank % 100) if x.what == "gemm_bf16" and x.rank < 200 else x
    for x in (*HEALTHY.locals, *COPIES)
)
RUN = dataclasses.replace(HEALTHY, locals=SLOW, probes=mesh(NODES, cut=((3, 9), (9, 3))))
RESULT = judge(RUN)


def test_a_condensed_run_keeps_all_findings() -> None:
    gemm = RESULT.check("gemm")
    assert {figure.rank for figure in gemm.figures if figure.verdict == "FAIL"} == set(range(200))
    assert len([figure for figure in gemm.figures if figure.verdict == "PASS"]) == 1, "the highest"
    assert of_check(gemm) == "gemm_bf16 600 to 763 TFLOPS (at least 731)"
    assert (len(RESULT.bad_nodes), verdict_of(RESULT, "mesh")) == (25, "FAIL")
    hbm = RESULT.check("hbm")
    assert len(hbm.figures) <= MAX_FIGURES + 1
    assert {(p.src, p.dst) for p in RESULT.measurements.probes if not p.connected} == {(3, 9), (9, 3)}


def test_a_condensed_run_omits_repeated_and_healthy_measurements_with_a_note() -> None:
    run = RESULT.measurements
    assert len(run.probes) < len(RUN.probes) / 10
    assert {state.when for state in run.health} == {"after"}
    assert [local.value for local in run.locals if (local.rank, local.what) == (5, "peer_copy")] == [368.0]
    assert all(local.samples == () for local in run.locals)
    assert (run.facts[8].versions, run.facts[9].versions) == (RUN.facts[8].versions, {})
    assert ["connections" in RESULT.notes[0], "ranks' figures" in RESULT.notes[1]] == [True, True]


def test_a_condensed_run_lists_every_rank_with_its_node_and_gpu() -> None:
    assert len(by_rank(RESULT)[1]) == NODES * 8
    stored_run = past_runs.run_of(RESULT)
    assert stored_run.gpus["host-129"] == tuple(f"GPU-129-{index}" for index in range(8))
    (parts,) = (record.parts for record in stored_run.records if record.op == "hbm_copy")
    assert len(parts) == NODES * 8


def test_a_condensed_run_is_read_back_unchanged() -> None:
    text = result.to_json(RESULT)
    assert result.from_json(text) == RESULT
    assert len(text) < 3_000_000


def test_a_small_run_is_not_condensed() -> None:
    run = gpu_run(2)
    assert judge(run).measurements == condensed_run(run) == run
