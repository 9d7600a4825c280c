"""Record which engine trains what, by whole runs with tiny models, and why it refuses the rest.

    python -m benchmarks.support_table    # some minutes on 2 cores; writes benchmarks/results/support.csv

A row's result is "runs" if training, resuming and exporting worked, else the engine's reason for refusing it
or the error. Rows of parts, engines and tasks that are not selected are kept. To add a part, add its function
to ``PARTS``; ``python -m benchmarks.documents`` writes the documents' tables from it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

from estimator.models import hf_files
from estimator.vocabulary import LAUNCHED_ENGINES
from launchers import settings
from launchers.run.job import unsupported
from tests.launchers.engines import methods
from tests.launchers.engines.loop import families as proofs

TABLE = Path(__file__).parent / "results" / "support.csv"
RUNS = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cell of the documents' tables."""

    part: str
    engine: str
    method: str  # a method, or "packing"
    family: str  # Hugging Face's `model_type`, or the name of a model
    nodes: int
    result: str
    task: str = "sft"
    releases: str = ""  # of the packages that ran it; blank: not recorded
    date: str = ""


PACKAGES = ("torch", "transformers", "peft", "deepspeed")
Chosen = Sequence[str]  # engines
TASKS = tuple(dict.fromkeys(cell.task for cell in methods.TASK_CELLS))


def of_families(
    chosen_engines: Chosen = LAUNCHED_ENGINES, chosen: Sequence[str] = tuple(proofs.FAMILIES)
) -> list[Row]:
    """Run each engine of the loop with a tiny model of each family; one row covers all of its shardings."""
    with tempfile.TemporaryDirectory() as folder:
        first = (proofs.RESUMED[0],)  # reference for the others
        shardings = [name for name, engine in proofs.SHARDINGS.items() if engine in chosen_engines]
        done = [
            proof
            for sharding in dict.fromkeys((*first, *shardings))
            for proof in proofs.prove(Path(folder) / sharding, sharding, chosen)
        ]
        other_rows = {(p.family, p.method): p for p in done if p.sharding == proofs.RESUMED[0]}
        result: dict[tuple[str, str, str], list[str]] = {}
        for proof in done:
            out = proof.whole.work_dir / "collected"
            clauses = proofs.problems(proof, other_rows[proof.family, proof.method], out)
            key = (proofs.SHARDINGS[proof.sharding], proof.method, proof.family)
            result.setdefault(key, []).extend(f"{proof.sharding}: {clause}" for clause in clauses)
        rows = [
            Row(part="families", engine=engine, method=method, family=family, nodes=1, result=_result(reason))
            for (engine, method, family), reason in result.items()
            if engine in chosen_engines
        ]
        models = {family: Path(folder) / "models" / family for family in chosen}
        families = [
            (engine, family) for engine in dict.fromkeys(proofs.SHARDINGS.values()) for family in chosen
        ]
        families = [(engine, family) for engine, family in families if engine in chosen_engines]
        return rows + [_packing(engine, family, models[family]) for engine, family in families]


def of_methods(chosen_engines: Chosen = LAUNCHED_ENGINES) -> list[Row]:
    """Run each engine by each method with tiny-llama, on one node and on two."""
    return _of_cells("methods", methods.CELLS, chosen_engines)


def of_tasks(chosen_engines: Chosen = LAUNCHED_ENGINES, chosen: Sequence[str] = TASKS) -> list[Row]:
    """Run each engine by each task and some methods with tiny-llama, on one node and on two."""
    return _of_cells("tasks", [cell for cell in methods.TASK_CELLS if cell.task in chosen], chosen_engines)


def _of_cells(part: str, cells: Iterable[methods.Cell], chosen_engines: Chosen) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        methods.make(folder)
        prove = cache(lambda cell: methods.prove(folder, cell))
        for cell in cells:
            if cell.engine not in chosen_engines:
                continue
            result = methods.refusal(folder, cell)
            if result is None:
                one = dataclasses.replace(cell, nodes=1)
                out = folder / cell.name / "collected"
                result = _result(methods.problems(prove(cell), prove(one), out))
            rows.append(Row(part=part, family="tiny-llama", result=result, **dataclasses.asdict(cell)))
    return rows


def _result(problems: Iterable[str]) -> str:
    """Join the problems of a cell; RUNS without any."""
    return "; ".join(problems) or RUNS


def _packing(engine: str, family: str, folder: Path) -> Row:
    """Return whether the engine accepts packed rows of a family; test_families.py verifies it."""
    job = settings.build({"engine": engine, "packing": True, "seq_len": 64})
    clause = unsupported(engine, job, hf_files.read_directory(folder, f"a {family} model"))
    result = RUNS if clause is None else clause
    return Row(part="families", engine=engine, method="packing", family=family, nodes=1, result=result)


PARTS: dict[str, Callable[..., list[Row]]] = {
    "families": of_families,
    "methods": of_methods,
    "tasks": of_tasks,
}


def read() -> list[Row]:
    """Read the committed table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [Row(**{**row, "nodes": int(row["nodes"])}) for row in csv.DictReader(file)]  # type: ignore[arg-type]


def write(
    rows: Iterable[Row],
    *,
    part: str,
    chosen_engines: Chosen = LAUNCHED_ENGINES,
    tasks: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
) -> None:
    """Replace the table's rows of ``part`` and these engines, tasks and families (None: all)."""
    old_rows = read() if TABLE.is_file() else []

    def kept(row: Row) -> bool:
        selected = (tasks is None or row.task in tasks) and (families is None or row.family in families)
        return row.part != part or row.engine not in chosen_engines or not selected

    rest = [row for row in old_rows if kept(row)]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        key = [field.name for field in fields(Row)]
        today = datetime.now(tz=UTC).date().isoformat()
        new_rows = [dataclasses.replace(row, releases=installed_releases(), date=today) for row in rows]
        ordered = sorted(map(asdict, [*rest, *new_rows]), key=lambda row: [str(row[name]) for name in key])
        writer.writerows(ordered)


def installed_releases() -> str:
    """Describe the installed releases of the packages that train."""
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def tested_with(rows: Iterable[Row]) -> str:
    """Describe the releases and the days of runs, with the number of results of each."""
    counts = Counter((row.releases, row.date) for row in rows)
    clauses = [
        f"{releases or 'releases that were not recorded'}{' on ' * bool(date)}{date} ({number} results)"
        for (releases, date), number in sorted(counts.items(), reverse=True)
    ]
    return f"Tested with {'; '.join(clauses)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="all of them by default")
    parser.add_argument("--engine", action="append", choices=LAUNCHED_ENGINES, help="all by default")
    parser.add_argument("--task", action="append", choices=TASKS, help="of part tasks; all by default")
    parser.add_argument(
        "--family", action="append", choices=list(proofs.FAMILIES), help="of part families; all by default"
    )
    options = parser.parse_args()
    chosen = tuple(options.engine or LAUNCHED_ENGINES)
    for part in options.part or PARTS:
        tasks = options.task if part == "tasks" else None
        families = options.family if part == "families" else None
        only = tasks or families
        rows = PARTS[part](chosen, *([only] if only else []))
        write(rows, part=part, chosen_engines=chosen, tasks=tasks, families=families)


if __name__ == "__main__":
    main()
