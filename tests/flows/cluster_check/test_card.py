"""The card of the checklist: its content, and rendering in a browser without a network."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checklist import past_runs
from checklist.analysis.baseline import Record
from checklist.result import Result
from checklist.verdict import judge
from decorators.card.blocks import Block, Chart, Grid, Text
from flows.cluster_check.card import (
    COMMAND_COLUMNS,
    MAX_FINDINGS,
    MAX_NODES,
    MAX_RANKS,
    draw,
    figure_histories,
    message,
    pair_cells,
    sweep_points,
)
from tests.browser import charts, first_screen, needs_browser, rows_with, words
from tests.checklist.clusters import Cluster
from tests.checklist.runs import GIB, collective, gpu_run, with_pairs
from tests.flows.conftest import environment

FLOW = Path(__file__).parents[1] / "flows" / "card_of_a_check.py"
SLOW = 2  # the node that sends slowly
FAIL_RED = (0xE4, 0x57, 0x56)


def _slow_run(nodes: int = 6) -> Result:
    """A run on GPUs whose third node sends at half the speed, with a sweep of all_reduce."""
    cluster = Cluster(nodes=nodes, speed=45, transmit={SLOW: 0.5})
    run = with_pairs(gpu_run(nodes), cluster)
    ranks = 8 * nodes
    sweep = tuple(
        collective("all_reduce", size, 80e-6 + size / 240e9, ranks, nodes)
        for size in (1024, 4096, 2**20, 2**26, 2**28, 2**30, 4 * GIB)
    )
    return judge(dataclasses.replace(run, collectives=(*run.collectives, *sweep)))


def _earlier(result: Result, runs: int = 4) -> list[past_runs.PastRun]:
    """Return the same runs on earlier days."""
    runs_made = []
    for day in range(1, runs + 1):
        back = result.finished_unix - 86_400 * day
        records = tuple(
            dataclasses.replace(item, unix=back, verdict="PASS", value=item.value * (1 + 0.01 * day))
            for item in result.records
        )
        stored_run = past_runs.run_of(dataclasses.replace(result, records=records, finished_unix=back))
        runs_made.append(dataclasses.replace(stored_run, verdict="PASS"))
    return runs_made


def _text(blocks: list[Block]) -> str:
    return "\n".join(block.markdown for block in blocks if isinstance(block, Text))


def test_the_verdict_and_the_advice_come_first() -> None:
    result = _slow_run()
    blocks = draw(result, (), "kubernetes:api/default")
    assert result.verdict == "FAIL"
    assert isinstance(blocks[0], Text)
    assert blocks[0].markdown.startswith("## FAIL: not fit for training")
    assert "Bad nodes: **host-2**" in blocks[0].markdown
    finding = next(item for item in result.findings if item.verdict == "FAIL")
    assert isinstance(blocks[2], Text)
    assert "host-2" in blocks[2].markdown
    assert finding.command is not None
    assert f"```bash\n{finding.command}\n```" in blocks[2].markdown.replace(" \\\n  ", " ")


@pytest.mark.parametrize(("omitted", "shown"), [(0, False), (1, True)])
def test_findings_beyond_the_limit_are_counted(omitted: int, shown: bool) -> None:
    result = _slow_run()
    findings = (result.findings[0],) * (MAX_FINDINGS + omitted)
    text = _text(draw(dataclasses.replace(result, findings=findings), (), "c"))
    assert ("Findings not shown: 1." in text) is shown


def test_every_check_is_in_the_table_with_its_verdict() -> None:
    result = _slow_run()
    grids = [block for block in draw(result, (), "c") if isinstance(block, Grid)]
    table = next(grid for grid in grids if grid.headers[0] == "check" and len(grid.headers) == 5)
    assert [(row[0], row[1]) for row in table.rows] == [(c.check, c.verdict) for c in result.checks]


def test_a_pair_shows_its_isolated_measurement() -> None:
    result = _slow_run()
    measurements = result.measurements
    alone = {(pair.src, pair.dst): pair for pair in measurements.pairs if pair.alone}
    assert alone
    cells = {(cell.src, cell.dst): cell for cell in pair_cells(measurements, measurements.nodes)}
    assert len(cells) == 6 * 5
    for (src, dst), pair in alone.items():
        cell = cells[measurements.names[src], measurements.names[dst]]
        assert (cell.gbytes_per_s, cell.note) == (pair.gbytes_per_s, "measured alone")


def test_the_card_of_a_large_cluster_shows_faulty_nodes_and_counts_omitted_ones() -> None:
    nodes = MAX_NODES + 16
    slow = nodes - 1
    run = with_pairs(gpu_run(nodes), Cluster(nodes=nodes, speed=45, transmit={slow: 0.5}))
    result = judge(run)
    assert result.bad_nodes == (f"host-{slow}",)
    blocks = draw(result, (), "c")
    assert "16 nodes without findings are omitted" in _text(blocks)
    table = next(b for b in blocks if isinstance(b, Grid) and b.headers[0] == "node")
    assert len(table.rows) == MAX_NODES
    assert f"host-{slow}" in {row[0] for row in table.rows}


def test_a_sweep_is_shown_with_its_fit_and_its_minimum() -> None:
    result = _slow_run(2)
    items = [item for item in result.measurements.collectives if item.op == "all_reduce"]
    points = sweep_points(result, items)
    assert [point.bytes for point in points] == sorted(item.bytes for item in items)
    # 240 GB/s of algbw are 240 * 2 * 15 / 16 of busbw over 16 ranks, at sizes where the latency is nothing
    assert points[-2].expected == pytest.approx(450, rel=0.1)
    floors = [point.floor for point in points if point.floor is not None]
    assert floors, "the ports of p5.48xlarge are known"


def test_a_measurement_is_compared_only_with_runs_in_the_same_environment() -> None:
    result = _slow_run(2)
    runs = _earlier(result)
    now: Record = result.records[0]
    elsewhere = dataclasses.replace(now, setting=dataclasses.replace(now.setting, driver="999"))
    other = dataclasses.replace(runs[0], records=(elsewhere,))
    histories = figure_histories((now, result.records[1]), [*runs, other])
    assert [len(points) for _, points in histories] == 2 * [len(runs) + 1]
    assert figure_histories((now,), [other]) == []


@pytest.mark.parametrize(
    ("size_bytes", "reported"), [(8, "8 B"), (4096, "4 KiB"), (3 * 2**19, "1.5 MiB"), (4 * GIB, "4 GiB")]
)
def test_message_sizes_are_shown_in_binary_units(size_bytes: int, reported: str) -> None:
    assert message(size_bytes) == reported


def test_chart_data_contains_plain_values_only() -> None:
    for block in draw(_slow_run(), _earlier(_slow_run()), "c"):
        if isinstance(block, Chart):
            json.dumps(block.spec, allow_nan=False)


@needs_browser
@pytest.mark.slow
@pytest.mark.nightly
def test_the_card_renders_in_a_browser_without_a_network(tmp_path: Path) -> None:
    import pickle

    result: Any = _slow_run()
    blocks = draw(result, _earlier(result), "kubernetes:api/default")
    (tmp_path / "drawn").write_bytes(pickle.dumps(blocks))
    for command in (["run"], ["card", "get", "start", "card.html"]):
        subprocess.run(
            [sys.executable, str(FLOW), *command],
            cwd=tmp_path,
            env=environment(tmp_path, PYTHONPATH=str(Path(__file__).parents[3])),
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=120,
        )
    page = tmp_path / "card.html"
    text = words(page)
    assert "FAIL: not fit for training" in text
    assert "Bad nodes: host-2" in text
    assert "all_reduce" in text, "an underscore that Markdown eats"
    assert charts(page) == sum(isinstance(block, Chart) for block in blocks)
    assert rows_with(first_screen(page), FAIL_RED) > 20  # the failed check, seen without scrolling


def test_measurements_are_shown_next_to_verdicts_and_for_each_rank() -> None:
    blocks = draw(judge(gpu_run(9)), (), "c")
    checks = next(b for b in blocks if isinstance(b, Grid) and b.headers[:2] == ("check", "verdict"))
    assert {row[0]: row[3] for row in checks.rows}["gemm"] == "gemm_bf16 760 to 763 TFLOPS (at least 731)"
    ranks = next(b for b in blocks if isinstance(b, Grid) and b.headers[0] == "rank")
    assert len(ranks.rows) == MAX_RANKS
    assert ranks.rows[9][:3] == ("9", "host-1", "760")
    assert f"and {9 * 8 - MAX_RANKS} more" in _text(blocks)


def test_the_card_of_a_run_on_one_machine_states_its_limits_and_the_next_command() -> None:
    result = judge(gpu_run(1, 4, probes=(), pairs=()))
    text = draw(result, (), "c")[0]
    assert isinstance(text, Text)
    assert text.markdown.startswith("## PASS: no problem found on this machine")
    assert "Software works; " in text.markdown
    assert "1 node of c, nccl on GPUs" in text.markdown
    assert "\n".join(result.next_commands) in text.markdown.replace(" \\\n  ", " ")
    assert max(map(len, text.markdown.partition("```")[2].splitlines())) <= COMMAND_COLUMNS + 2
