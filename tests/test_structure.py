"""Import cycles, and locations of tests; test_docs.py tests the module map."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("metaflow_extensions", "flows", "checklist", "decorators", "launchers", "estimator", "benchmarks")
FOLDERS = sorted(
    ".".join(file.parent.relative_to(ROOT).parts)
    for package in PACKAGES
    for file in (ROOT / package).rglob("__init__.py")
)
TEST_FILES = sorted(
    str(file.relative_to(ROOT / "tests"))
    for package in PACKAGES
    for file in (ROOT / "tests" / package).rglob("test_*.py")
)


@cache
def imports() -> dict[str, set[str]]:
    """Return for each module the project modules that it imports, including type-only and local imports."""
    files = {_name(file): file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))}
    return {name: _imported(name, file, set(files)) for name, file in files.items()}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, file: Path, modules: set[str]) -> set[str]:
    imported: set[str] = set()
    for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{file}:{statement.lineno} imports by dots"
            module_name = f"{statement.module}"
            # `from package import module` is an import of the module, `from module import name` is not
            imported |= {
                f"{module_name}.{a.name}" if f"{module_name}.{a.name}" in modules else module_name
                for a in statement.names
            }
    return (imported & modules) - {name}


def ranks_in_the_map() -> dict[str, dict[str, int]]:
    """Return for each package the position of each folder or module in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ranks = {}
    for package, order in re.findall(r"^(\w+): +(\w.*(?:\n +->.*)*)", text, re.MULTILINE):
        groups = [re.findall(r"\w+", group.replace(".py", "")) for group in order.split("->")]
        ranks[package] = {name: rank for rank, names in enumerate(groups) for name in names}
    return ranks


def test_folders_import_only_folders_to_their_right_in_the_module_map() -> None:
    ranks = ranks_in_the_map()
    assert ranks.keys() == {"flows", "checklist", "decorators", "launchers", "estimator"}
    for package, rank in ranks.items():
        missing = [name for name in rank if not list((ROOT / package).glob(f"{name}*"))]
        assert missing == []
    wrong = []
    for module, imported in imports().items():
        package, _, importer = module.partition(".")
        rank = ranks.get(package, {})
        importer = importer.partition(".")[0]
        for name in imported:
            other, _, target = name.partition(".")
            target = target.partition(".")[0]
            is_known = other == package and importer in rank and target in rank and importer != target
            if is_known and rank[importer] >= rank[target]:
                wrong.append(f"{module} -> {name}")
    assert wrong == []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that can reach each other (the algorithm of Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                cycles.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(cycles)


def test_modules_have_no_import_cycle() -> None:
    assert circles(imports()) == []


def rooms(folder: str) -> dict[str, set[str]]:
    """Return for each file or folder directly in ``folder`` the siblings that it imports from."""
    inside = folder.count(".") + 1  # parts of a module's name that every module of the folder shares
    graph: dict[str, set[str]] = {}
    for module, imported in imports().items():
        if module.startswith(f"{folder}."):
            room = module.split(".")[inside]
            folders = {name.split(".")[inside] for name in imported if name.startswith(f"{folder}.")}
            graph[room] = graph.get(room, set()) | folders - {room}
    return graph


@pytest.mark.parametrize("folder", FOLDERS)
def test_sibling_files_and_folders_have_no_import_cycle(folder: str) -> None:
    assert circles(rooms(folder)) == []


def test_an_import_cycle_is_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize("package", ["decorators", "launchers", "estimator"])
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


def test_every_module_of_the_packages_is_checked() -> None:
    assert len(imports()) > 250
    assert "checklist.checks.host.facts_judge" in imports()["checklist.verdict"]
    assert "run" in rooms("checklist")["__main__"]
    assert (
        "checklist.checks.host.facts_probe" in imports()["checklist.run.worker"]
    )  # imported inside of a function


@pytest.mark.parametrize("file", TEST_FILES)
def test_a_test_file_is_named_after_a_module_package_or_export(file: str) -> None:
    """More words may follow: cli/test_plan_from_cluster.py is of cli/plan.py. test_docs.py is of docs/.

    test_limits.py has the edges of a package's thresholds, clamps and limits.
    """
    folder = Path(file).parent
    modules = {path.stem.strip("_") for path in (ROOT / folder).glob("*.py")}
    modules |= {folder.name, "docs", "limits"}
    package = importlib.import_module(".".join(folder.parts))
    name_parts = Path(file).stem.removeprefix("test_").split("_")
    names = {"_".join(name_parts[:count]) for count in range(1, len(name_parts) + 1)}
    assert names & modules or names & set(dir(package))
