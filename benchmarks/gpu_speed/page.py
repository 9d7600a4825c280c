"""Results as rows and as a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu_speed.cases import PEERS, Case, Run
from benchmarks.gpu_speed.predicted import plan_of_today
from benchmarks.gpu_speed.session import Results
from benchmarks.gpu_speed.suites import Suite
from estimator.plan import GIB, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """Command, date, processor and software versions of a measurement."""

    title: str
    command: str
    day: str
    processor: str
    versions: dict[str, str]  # by package


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case by one engine of this package. None: not measured, or nothing to compare with.

    Predictions are those of today's estimator for the measured layout.
    """

    case: str
    engine: str
    tokens_per_s: float | None
    best_peer: str | None
    best_peer_tokens_per_s: float | None
    ratio: float | None
    share_of_limit: float | None
    tokens_per_s_predicted: float | None
    reserved_gib: float | None
    reserved_gib_predicted: float | None
    ended: str  # "ran", "out of memory", "failed", "refused", "no time" or "not measured"
    message: str = ""


def rows(suite: Suite, results: Results) -> list[Row]:
    """Build a row for each run of this package, in order."""
    return [_row(run, suite, results) for run in suite.runs if not run.is_peer]


def _row(run: Run, suite: Suite, results: Results) -> Row:
    outcome = results.outcomes.get(run.name)
    peer, best = _best_peer(run.case, results)
    rate = outcome.tokens_per_second if outcome else None
    plan = plan_of_today(run, suite.scale, outcome) if outcome else None
    share = None
    if rate is not None and outcome and outcome.plan and results.limit is not None:
        measured = plan or Plan.from_json(outcome.plan)
        share = rate * measured.prediction.flops_per_token / results.limit["flops"]
    reserved = outcome.reserved_bytes if outcome else None
    predicted = plan.prediction.memory.counted("reserved") if plan and reserved else None
    return Row(
        case=run.case.name,
        engine=run.engine,
        tokens_per_s=rate,
        best_peer=peer,
        best_peer_tokens_per_s=best,
        ratio=rate / best if rate is not None and best is not None else None,
        share_of_limit=share,
        tokens_per_s_predicted=plan.prediction.tokens_per_second if plan else None,
        reserved_gib=reserved / GIB if reserved else None,
        reserved_gib_predicted=predicted.likely_bytes / GIB if predicted else None,
        ended=outcome.ended if outcome else "not measured",
        message=outcome.message if outcome else "",
    )


def _best_peer(case: Case, results: Results) -> tuple[str | None, float | None]:
    """Return the fastest peer that ran a case, and its tokens/s."""
    rates = {}
    for peer in PEERS:
        outcome = results.outcomes.get(Run(case=case, engine=peer).name)
        if outcome is not None and outcome.tokens_per_second is not None:
            rates[peer] = outcome.tokens_per_second
    if not rates:
        return None, None
    best = max(rates, key=lambda name: rates[name])
    return best, rates[best]


def figures(suite: Suite, results: Results, heading: Heading) -> dict[str, Any]:
    """Return all results for the JSON file."""
    peers = []
    for run in suite.runs:
        outcome = results.outcomes.get(run.name)
        if run.is_peer and outcome is not None:
            peers.append(
                {
                    "case": run.case.name,
                    "engine": run.engine,
                    "tokens_per_s": outcome.tokens_per_second,
                    "ended": outcome.ended,
                    "notes": list(outcome.notes),
                }
            )
    return {
        **asdict(heading),
        "card": results.card,
        "limit": results.limit,
        "equality": results.equality,
        "rows": [asdict(row) for row in rows(suite, results)],
        "peers": peers,
        "runs": {name: outcome.to_dict() for name, outcome in results.outcomes.items()},
    }


def render(suite: Suite, results: Results, heading: Heading) -> str:
    """Write the page in Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in heading.versions.items())
    lines = [
        f"# {heading.title} on {results.card}",
        "",
        f"`{heading.command}`, {heading.day}, {heading.processor}, {versions}.",
        "",
    ]
    if results.limit is not None:
        flops = results.limit["flops"] / 1e12
        driver = results.limit["driver"] and f" Driver {results.limit['driver']}."
        lines += [
            f"A matrix product of side {results.limit['side']} runs at {flops:,.4g} TFLOP/s.{driver}",
            "",
        ]
    if results.equality is not None:
        errors = "; ".join(
            f"{kind}: loss {loss:.1e}, gradients {gradient:.1e}"
            for kind, (loss, gradient) in results.equality["errors"].items()
        )
        verdict = "equal" if results.equality["equal"] else "NOT equal"
        lines += [
            f"Variable-length attention and the mask are {verdict} (relative errors {errors}; tolerance "
            f"{results.equality['tolerance']:g}).",
            "",
        ]
    lines += [
        "Rows of the length in the case's name at most, packed for pre-training; real tokens of one GPU, "
        "median of the steps after the warm-up. Share of the limit: the model's FLOPs per token without "
        "recomputation, over the product's rate. Predictions are those of the estimator when this page was "
        "written. Peers train rows of the full length, which need neither "
        "padding nor a mask.",
        "",
        "| Case | Engine | Tokens/s | Predicted | Best peer | Ratio | Share of limit | GiB | Predicted |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    rows_of_page = rows(suite, results)
    measured = [row for row in rows_of_page if row.ended != "not measured"]
    for row in measured:
        peer = "" if row.best_peer is None else f"{row.best_peer} {row.best_peer_tokens_per_s:,.0f}"
        rate = f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else row.ended
        cells = [
            row.case,
            row.engine,
            rate,
            _number(row.tokens_per_s_predicted, ",.0f"),
            peer,
            _number(row.ratio, ".2f"),
            _number(row.share_of_limit, ".0%"),
            _number(row.reserved_gib, ".1f"),
            _number(row.reserved_gib_predicted, ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if len(measured) < len(rows_of_page):
        lines += [
            "",
            f"{len(rows_of_page) - len(measured)} of {len(rows_of_page)} rows are not measured yet.",
        ]
    reasons = [row for row in rows_of_page if row.message and row.tokens_per_s is None]
    if reasons:
        lines += ["", *(f"- {row.case}, {row.engine}: {row.ended}: {row.message}" for row in reasons)]
    if not any(run.is_peer for run in suite.runs):
        return "\n".join(lines) + "\n"
    lines += ["", "| Case | Peer | Tokens/s | Settings |", "|---|---|---:|---|"]
    for run in suite.runs:
        outcome = results.outcomes.get(run.name)
        if run.is_peer and outcome is not None:
            rate = (
                f"{outcome.tokens_per_second:,.0f}"
                if outcome.tokens_per_second is not None
                else outcome.ended
            )
            notes = ", ".join(outcome.notes) or outcome.message
            lines.append(f"| {run.case.name} | {run.engine} | {rate} | {notes} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
