"""The checklist's card as plain blocks: verdict and advice at the top, then the measurements."""

from __future__ import annotations

import datetime
import re
from collections import defaultdict
from collections.abc import Sequence

from checklist.analysis.baseline import Record
from checklist.analysis.busbw import Fit, busbw
from checklist.measurements import Collective, Facts, Measurements
from checklist.outputs.figures import by_rank, of_check, with_sources
from checklist.past_runs import PastRun
from checklist.registry import CHECKS
from checklist.result import CheckResult, Finding, FitResult, Result
from decorators.card.blocks import UNKNOWN, Block, Chart, Grid, Text, safe, size
from flows.cluster_check import charts
from flows.cluster_check.charts import Cell, HistoryPoint, Point, Tile

MAX_FINDINGS = 20
MAX_NODES = 64  # in a table or the heat map; nodes with findings are listed first
MAX_RANKS = 64  # rows of the table of local measurements; ranks named by a finding are listed first
MAX_HISTORIES = 8  # charts of figures over the runs
COMMAND_COLUMNS = 44  # fits a page 400 pixels wide
_ARGUMENT = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # an unquoted space ends it
_VERDICT_TEXTS = {
    "PASS": "fit for training, as far as measured",
    "WARN": "fit for training, with doubts",
    "FAIL": "not fit for training",
    "NO-VERDICT": "not enough was measured",
}
_ONE_MACHINE = "no problem found on this machine, as far as measured"


def draw(result: Result, runs: Sequence[PastRun], cluster: str) -> list[Block]:
    """Return the blocks of the card. ``runs``: earlier runs on this cluster."""
    blocks: list[Block] = [Text(markdown=heading(result, cluster))]
    if result.checks:
        tiles = [Tile(check=c.check, verdict=c.verdict, reason=c.reason) for c in result.checks]
        blocks.append(Chart(spec=charts.tiles(tiles)))
    blocks += [Text(markdown=finding_text(finding)) for finding in result.findings[:MAX_FINDINGS]]
    if len(result.findings) > MAX_FINDINGS:
        blocks.append(Text(markdown=f"Findings not shown: {len(result.findings) - MAX_FINDINGS}."))
    if result.standing:
        blocks += [
            Text(markdown="### Still open from earlier runs"),
            Grid(
                headers=("since", "check", "nodes", "what"),
                rows=tuple(
                    (_time(item.since_unix), item.check, ", ".join(item.nodes) or "the cluster", item.title)
                    for item in result.standing
                ),
            ),
        ]
    blocks += [
        Text(markdown="### Checks"),
        Grid(headers=("check", "verdict", "reason", "measured", "meaning"), rows=check_rows(result.checks)),
    ]
    if references := with_sources(result):
        headers = ("check", "figure", "measured", "reference", "source")
        blocks += [Text(markdown="### References"), Grid(headers=headers, rows=references)]
    blocks += _ranks(result) + _pairs(result) + _sweeps(result) + _history(result, runs) + _facts(result)
    if result.skipped:
        rows = tuple((item.check, item.reason) for item in result.skipped)
        blocks += [Text(markdown="### Skipped"), Grid(headers=("check", "why"), rows=rows)]
    if result.notes:
        notes = "\n".join(f"- {safe(note)}" for note in result.notes)
        blocks.append(Text(markdown=f"### Notes\n\n{notes}"))
    return blocks


def heading(result: Result, cluster: str) -> str:
    """Format the verdict and its scope."""
    run = result.measurements
    kind = "process" if run.local else "node"
    plural = "es" if run.local else "s"
    nodes = f"1 {kind}" if len(result.nodes) == 1 else f"{len(result.nodes)} {kind}{plural}"
    where = f"{nodes} of {safe(cluster)}, {run.backend} on {'GPUs' if run.device == 'cuda' else 'CPUs'}"
    finished = _time(result.finished_unix)
    lines = [
        f"## {result.verdict}: {_verdict_text(result)}",
        f"**{safe(result.headline)}**",
        f"{where} · profile {result.profile} · {run.seconds:.0f} s · {finished}",
    ]
    if result.bad_nodes:
        lines.append(f"Bad nodes: **{safe(', '.join(result.bad_nodes))}**")
    if result.next_commands:
        text = "To check the network, run one of these on two nodes (by torchrun on both, or as a flow):"
        lines.append(f"{text}\n\n{_code(*result.next_commands)}")
    return "\n\n".join(lines)


def _verdict_text(result: Result) -> str:
    return (
        _ONE_MACHINE if result.verdict == "PASS" and result.next_commands else _VERDICT_TEXTS[result.verdict]
    )


def finding_text(finding: Finding) -> str:
    """Format a finding: the problem, the affected nodes, what to do, and the command to copy."""
    lines = [f"### {finding.verdict}: {safe(finding.title)}"]
    if finding.suspects:
        lines.append(f"Suspects: {safe(', '.join(finding.suspects))}.")
    if finding.advice:
        lines.append(safe(" ".join(finding.advice)))
    if finding.command:
        lines.append(_code(finding.command))
    return "\n\n".join(lines)


def _code(*commands: str) -> str:
    """Format shell commands as a block of code, long ones on several lines."""
    return "\n".join(("```bash", *map(_continued, commands), "```"))


def _continued(command: str) -> str:
    """Break a command between its arguments where a line exceeds ``COMMAND_COLUMNS``."""
    lines = [""]
    for argument in _ARGUMENT.findall(command):
        if lines[-1] and len(lines[-1]) + 1 + len(argument) > COMMAND_COLUMNS:
            lines.append(f"  {argument}")
        else:
            lines[-1] += f" {argument}" if lines[-1] else argument
    return " \\\n".join(lines)


def check_rows(checks: Sequence[CheckResult]) -> tuple[tuple[str, ...], ...]:
    """Return one row per requested check."""
    return tuple(
        (c.check, c.verdict, c.reason, of_check(c), CHECKS[c.check].description if c.check in CHECKS else "")
        for c in checks
    )


def _ranks(result: Result) -> list[Block]:
    """Return the local measurements of each GPU, or of each process on CPUs."""
    headers, rows = by_rank(result)
    if not rows:
        return []
    ranks_with_findings = {str(rank) for finding in result.findings for rank in finding.ranks}
    first = sorted(rows, key=lambda row: row[0] not in ranks_with_findings)[:MAX_RANKS]
    text = "### Rank by rank" + (f"\n\nand {len(rows) - MAX_RANKS} more" if len(rows) > MAX_RANKS else "")
    return [Text(markdown=text), Grid(headers=headers, rows=tuple(first))]


# ---- pairs


def _pairs(result: Result) -> list[Block]:
    run = result.measurements
    if not run.pairs:
        return []
    nodes, omitted = _nodes_to_show(result)
    text = "### Every pair of nodes, each direction\n\nGB/s from the node of the row to that of the column."
    if omitted:
        text += f" {omitted} nodes without findings are omitted."
    names = [run.names[node] for node in nodes]
    return [Text(markdown=text), Chart(spec=charts.heat_map(pair_cells(run, nodes), names))]


def pair_cells(run: Measurements, nodes: Sequence[int]) -> list[Cell]:
    """Return one cell per ordered pair; isolated measurements take precedence."""
    best: dict[tuple[int, int], Cell] = {}
    node_set, names = set(nodes), run.names
    for pair in sorted(run.pairs, key=lambda pair: (pair.alone, pair.gbytes_per_s or 0.0)):
        if {pair.src, pair.dst} <= node_set:
            best[pair.src, pair.dst] = Cell(
                src=names.get(pair.src, f"node {pair.src}"),
                dst=names.get(pair.dst, f"node {pair.dst}"),
                gbytes_per_s=pair.gbytes_per_s,
                note=pair.error or ("measured alone" if pair.alone else ""),
            )
    return list(best.values())


def _nodes_to_show(result: Result) -> tuple[list[int], int]:
    run = result.measurements
    nodes = list(run.nodes)
    if len(nodes) <= MAX_NODES:
        return nodes, 0
    with_findings = {name for finding in result.findings for name in (*finding.nodes, *finding.suspects)}
    names = run.names
    first = [node for node in nodes if names[node] in with_findings]
    rest = [node for node in nodes if names[node] not in with_findings]
    return sorted((first + rest)[:MAX_NODES]), len(nodes) - MAX_NODES


# ---- bandwidth over message size


def _sweeps(result: Result) -> list[Block]:
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for item in result.measurements.collectives:
        if item.busbw_gbytes_per_s is not None and item.bytes > 0:
            groups[item.op, item.dtype].append(item)
    sweeps = {key: items for key, items in groups.items() if len({item.bytes for item in items}) > 1}
    if not sweeps:
        return []
    text = (
        "### Bandwidth over message size\n\nBlue: measured. Dashed: latency plus size / bandwidth, fitted to "
        "the smallest and the largest messages. Red: what healthy clusters usually reach, or your threshold."
    )
    views = [
        charts.sweep(f"{op} {dtype}", sweep_points(result, items)) for (op, dtype), items in sweeps.items()
    ]
    return [Text(markdown=text), *(Chart(spec=view) for view in views)]


def sweep_points(result: Result, items: Sequence[Collective]) -> list[Point]:
    """Return the points of one operation's sweep with their expected values."""
    op, dtype, ranks = items[0].op, items[0].dtype, items[0].ranks
    fitted = next((fit for fit in result.fits if (fit.op, fit.dtype) == (op, dtype)), None)
    floors = {
        figure.bytes: figure.expected
        for check in result.checks
        for figure in check.figures
        if figure.basis in ("floor", "expectation") and figure.name == f"{op} {dtype}"
    }
    return [
        Point(
            bytes=item.bytes,
            measured=item.busbw_gbytes_per_s,
            expected=_expected(fitted, op, item.bytes, ranks),
            floor=floors.get(item.bytes),
        )
        for item in sorted(items, key=lambda item: item.bytes)
    ]


def _expected(fitted: FitResult | None, op: str, size_bytes: int, ranks: int) -> float | None:
    if fitted is None:
        return None
    curve = Fit(alpha_s=fitted.alpha_s, beta_gbytes_per_s=fitted.beta_gbytes_per_s, beta_from_bytes=None)
    seconds = curve.seconds(size_bytes)
    return busbw(op, size_bytes, seconds, ranks) if seconds else None


# ---- history


def _history(result: Result, runs: Sequence[PastRun]) -> list[Block]:
    histories = figure_histories(result.records, runs)
    if not runs:
        text = "There are no earlier runs on this cluster."
    elif not histories:
        text = "Earlier runs have no figures with the same setting (hardware, software, nodes, ranks)."
    else:
        text = "Runs with the same hardware, software, nodes and ranks. The color is the check's verdict."
    blocks: list[Block] = [Text(markdown=f"### History\n\n{text}")]
    if histories:
        views = [charts.over_time(title, points) for title, points in histories[:MAX_HISTORIES]]
        blocks += [Chart(spec=view) for view in views]
    if runs:
        newest = sorted(runs, key=lambda run: -run.finished_unix)[:10]
        rows = tuple((_time(run.finished_unix), run.verdict, run.profile) for run in newest)
        blocks.append(Grid(headers=("earlier run", "verdict", "profile"), rows=rows))
    return blocks


def figure_histories(
    current: Sequence[Record], runs: Sequence[PastRun]
) -> list[tuple[str, list[HistoryPoint]]]:
    """Return the history of each figure that earlier runs with the same setting also have."""
    histories = []
    past: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in (record for run in runs for record in run.records):
        past[record.setting, record.op, record.bytes].append(record)
    for now in current:
        if records := past[now.setting, now.op, now.bytes]:
            label = now.op if now.bytes is None else f"{now.op}, {message(now.bytes)}"
            points = [HistoryPoint(unix=r.unix, value=r.value, verdict=r.verdict) for r in (*records, now)]
            histories.append((f"{label}, {now.unit}", points))
    return histories


# ---- facts


def _facts(result: Result) -> list[Block]:
    run = result.measurements
    nodes, omitted = _nodes_to_show(result)
    leaders = {fact.node: fact for fact in sorted(run.facts, key=lambda fact: -fact.rank)}
    rows = tuple(fact_row(leaders[node]) for node in nodes if node in leaders)
    headers = ("node", "host", "GPUs", "interface", "zone", "shared memory", "clock", "software")
    blocks: list[Block] = [Text(markdown="### Nodes"), Grid(headers=headers, rows=rows)]
    if omitted:
        blocks.append(Text(markdown=f"and {omitted} more"))
    return blocks


def fact_row(fact: Facts) -> tuple[str, ...]:
    """Return the host facts that a node's first rank reported."""
    software = ", ".join(
        f"{name} {fact.versions[name]}"
        for name in ("torch", "nccl", "cuda", "driver")
        if fact.versions.get(name)
    )
    offset = fact.clock_offset_s
    return (
        fact.node_name or fact.hostname,
        " ".join(filter(None, (fact.hostname, fact.instance_type))),
        f"{len(fact.gpu_uuids)} x {fact.gpu_names[0]}" if fact.gpu_names else "none",
        fact.nic or UNKNOWN,
        fact.zone or UNKNOWN,
        size(fact.shm_bytes),
        UNKNOWN if offset is None else f"{offset * 1000:+.1f} ms",
        software or UNKNOWN,
    )


def message(size_bytes: int) -> str:
    """Format a message size: 4 KiB, 64 MiB."""
    for unit, bytes_each in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= bytes_each:
            return f"{size_bytes / bytes_each:.4g} {unit}"
    return f"{size_bytes} B"


def _time(unix: float) -> str:
    ended = datetime.datetime.fromtimestamp(unix, datetime.timezone.utc)
    return f"{ended:%Y-%m-%d %H:%M} UTC"
