"""Generate the record tables of docs/artifacts.md from the comments of the records' fields."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from estimator import vocabulary

ROOT = Path(__file__).parents[1]
RECORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Plan": (
        "estimator/plan.py",
        (
            *("Plan", "Request", "Layout", "Prediction", "MemoryEstimate", "StartUp", "Interruptions"),
            *("Override", "LearningRate", "Generation", "Stage"),
        ),
    ),
    "Measured": ("decorators/profile/measured.py", ("Measured", "GpuMeasured")),
    "RankMeasured": ("launchers/report/state.py", ("RankMeasured",)),
    "Metrics": ("launchers/report/metrics.py", ("Metrics",)),
    "Outcome": ("flows/finetune/node.py", ("Outcome",)),
    "EvaluationResult": ("launchers/evaluation/result.py", ("EvaluationResult", "Answer")),
}


def tables() -> str:
    """Build a heading and a table for each record."""
    parts = []
    for heading, (file, names) in RECORDS.items():
        source = (ROOT / file).read_text()
        tables_found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
        parts.append(f"## {heading}\n\nDefined in `{file}`.")
        parts += [
            _record(tables_found[name], source.splitlines(), 2 if name == heading else 3) for name in names
        ]
    return "\n\n".join(parts)


def _record(record: ast.ClassDef, lines: list[str], level: int) -> str:
    title = [] if level == 2 else [f"{'#' * level} {record.name}", ""]
    described, named = [], []
    for field in record.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = _comment(record, field, lines)
            if comment:
                described.append(f"| `{field.target.id}` | `{_type(field)}` | {comment} |")
            else:
                named.append(f"`{field.target.id}: {_type(field)}`".replace("\\|", "|"))
    table = ["", "| Field | Type | Meaning |", "|---|---|---|", *described] if described else []
    others = ["", f"{'Also' if described else 'Fields'}: {', '.join(named)}."] if named else []
    return "\n".join([*title, _docstring(record), *table, *others])


def _docstring(record: ast.ClassDef) -> str:
    """Return a record's first paragraphs without Sphinx markup."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", ast.get_docstring(record) or "")
    return text.replace("``", "`")


def _type(field: ast.AnnAssign) -> str:
    """Format a field's annotation; types of the vocabulary as their values."""
    values = get_args(getattr(vocabulary, ast.unparse(field.annotation), None))
    text = f"Literal[{', '.join(map(repr, values))}]" if values else ast.unparse(field.annotation)
    return text.replace("|", "\\|")


def _comment(record: ast.ClassDef, field: ast.AnnAssign, lines: list[str]) -> str:
    """Return the comment next to a field, or the string below it."""
    place = record.body.index(field)
    after = record.body[place + 1] if place + 1 < len(record.body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return _plain(str(after.value.value))
    _, _, comment = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")
    return _plain(comment)


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())
