"""Score the expected bus bandwidth against published figures, with each source left out.

    python -m benchmarks.busbw    # seconds

Writes the shares to estimator/data/fabric_shares.csv and the scores to benchmarks/results/busbw.md.

Each row of checklist/data/busbw.csv is judged twice: by the shipped shares, and by shares derived without the
row's own source. Margins and latencies of checklist/analysis/expectation.py were chosen on these rows, so the
second verdict tests the shares, not the form of the model.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checklist.analysis.expectation import (
    FABRICS,
    GATE,
    Expectation,
    Published,
    Ranges,
    expect,
    published,
    ranges_of,
)
from estimator.hardware.fabrics import TABLE, fabric_shares

FILE = Path(__file__).parent / "results" / "busbw.md"
NONE = "no verdict"
ACCEPTED = {"healthy": ("PASS",), "bad": ("WARN", "FAIL"), GATE: ("PASS", "WARN")}
KINDS = {
    "nvlink": "NVLink, ring",
    "nvlink-pair": "NVLink bridge of two GPUs",
    "nvls-450": "NVLink 4 with NVLS, all-reduce",
    "nvls-900": "NVLink 5 with NVLS, all-reduce",
    "xgmi": "xGMI",
    "pcie": "PCIe",
    "infiniband": FABRICS["infiniband"],
    "roce": FABRICS["roce"],
    "efa": "EFA v1 to v4",
    "tcpx": "GPUDirect-TCPX and TCPXO",
    "tcp": "TCP up to 32 Gbit/s",
    "tcp-fast": "TCP above 32 Gbit/s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One published figure with its verdicts."""

    row: Published
    expectation: Expectation | None
    shipped: str
    held_out: str

    def right(self, verdict: str) -> bool:
        return verdict in ACCEPTED[self.row.condition]


def scores(rows: Iterable[Published]) -> list[Scored]:
    """Judge all rows by the shipped shares, and by those of all other sources."""
    all_rows = list(rows)
    without = {
        source: ranges_of(row for row in all_rows if row.source != source)
        for source in {row.source for row in all_rows}
    }
    scored = []
    for row in all_rows:
        shipped = expect(row.wiring, row.op, row.bytes, row.algorithm)
        held_out = expect(row.wiring, row.op, row.bytes, row.algorithm, without[row.source])
        verdicts = [
            NONE if expected is None else expected.verdict(row.busbw_gbytes_per_s)
            for expected in (shipped, held_out)
        ]
        scored.append(Scored(row=row, expectation=shipped, shipped=verdicts[0], held_out=verdicts[1]))
    return scored


def summary(scored: list[Scored]) -> str:
    """Count the verdicts by condition of the cluster."""
    lines = [
        "| Published figures of | Rows | Judged by | Right | Wrong | No verdict |",
        "|---|---|---|---|---|---|",
    ]
    titles = {"healthy": "healthy clusters", "bad": "clusters with a known fault", GATE: "vendors' gates"}
    for condition, title in titles.items():
        same = [row for row in scored if row.row.condition == condition]
        for basis, verdicts in (
            ("all sources", [row.shipped for row in same]),
            ("other sources", [row.held_out for row in same]),
        ):
            none = verdicts.count(NONE)
            correct = sum(row.right(verdict) for row, verdict in zip(same, verdicts, strict=True))
            incorrect = len(same) - correct - none
            lines.append(f"| {title} | {len(same)} | {basis} | {correct} | {incorrect} | {none} |")
    return "\n".join(lines)


def shares_table() -> str:
    """List the shares of the line rate by kind of link and network."""
    lines = ["| Link or network | Low end | Usual | Sources |", "|---|---|---|---|"]
    for kind, title in KINDS.items():
        shares = fabric_shares()[kind]
        lines.append(f"| {title} | {shares.low:.0%} | {shares.typical:.0%} | {shares.sources} |")
    return "\n".join(lines)


def table(scored: list[Scored]) -> str:
    """List all rows with expectation and verdicts."""
    lines = [
        "| GPUs | Network | Operation | MiB | Figure | Low end | Usual | Cluster | Verdict | Held out |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    numbers = {source: n for n, source in enumerate(_sources(scored), 1)}
    for one in scored:
        row, wiring = one.row, one.row.wiring
        network = "" if wiring.domains == 1 else wiring.describe_network().partition(" = ")[0]
        operation = row.op + (f", {row.algorithm}" if row.algorithm else "")
        expected = one.expectation
        cells = (
            f"{wiring.domains} x {wiring.gpus} {row.gpu}".strip(),
            network,
            operation,
            f"{row.bytes / 2**20:.0f}",
            f"{row.busbw_gbytes_per_s:g} [{numbers[row.source]}]",
            "" if expected is None else f"{expected.low:.3g}",
            "" if expected is None else f"{expected.typical:.3g}",
            row.condition,
            one.shipped,
            one.held_out,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sources(scored: list[Scored]) -> dict[str, str]:
    return {row.row.source: row.row.date for row in scored}


def page(scored: list[Scored]) -> str:
    """Build benchmarks/results/busbw.md."""
    counts = Counter(one.row.condition for one in scored)
    sources = [f"{n}. {source} ({date})" for n, (source, date) in enumerate(_sources(scored).items(), 1)]
    return "\n".join(
        [
            "# Expected bus bandwidth against published figures",
            "",
            "`python -m benchmarks.busbw` writes this page from `checklist/data/busbw.csv`: "
            f"{len(scored)} figures, {counts['bad']} of them of clusters with a known fault.",
            "",
            "Right is PASS for a healthy cluster, WARN or FAIL for a faulty one, and anything but FAIL at",
            "the lowest value that a vendor's own check accepts (gate). Margins and latencies of the model",
            "were chosen on these rows; the verdicts held out use shares without the row's source.",
            "",
            summary(scored),
            "",
            "## Share of the line rate at large messages",
            "",
            shares_table(),
            "",
            "## All figures",
            "",
            "Bus bandwidth in GB/s; the number in brackets is the source.",
            "",
            table(scored),
            "",
            "## Sources",
            "",
            *sources,
            "",
        ]
    )


def documented() -> str:
    """Build the generated part of docs/checklist-rules.md."""
    return "\n\n".join([shares_table(), summary(scores(published()))])


def write_shares(ranges: Ranges) -> None:
    """Write the shares by kind of link or network to estimator/data/fabric_shares.csv."""
    with TABLE.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["kind", "low", "typical", "sources"])
        for kind, shares in sorted(ranges.items()):
            writer.writerow([kind, f"{shares.low:.4f}", f"{shares.typical:.4f}", shares.sources])
    fabric_shares.cache_clear()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    write_shares(ranges_of(published()))
    scored = scores(published())
    FILE.write_text(page(scored), encoding="utf-8")
    print(summary(scored))


if __name__ == "__main__":
    main()
