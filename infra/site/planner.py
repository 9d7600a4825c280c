"""A hook of mkdocs: the planner's page gets its scripts, Python for browsers, and the estimator.

Pyodide's core comes from the npm registry, in the version that planner/package-lock.json has with its
checksum, and lies in the site: a reader's browser asks no other host.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

HERE = Path(__file__).parent / "planner"
ESTIMATOR = Path(__file__).parents[2] / "estimator"
SCRIPTS = ("planner.js", "answer.js", "choices.js", "worker.js", "planner.css")
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
NOT_SHIPPED = ("cli", "exact", "__pycache__")  # folders that plans don't need
EPOCH = (1980, 1, 1, 0, 0, 0)  # of all members, so that equal modules are an equal archive
FETCH_S = 300


def on_post_build(*, config: Any, **_: Any) -> None:
    """Put all that the page loads beside it. Raises PluginError where Pyodide cannot be had."""
    target = Path(config.site_dir) / "assets" / "planner"
    (target / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        shutil.copyfile(HERE / name, target / name)
    pyodide = _pyodide()
    for name in PYODIDE:
        shutil.copyfile(pyodide / name, target / "pyodide" / name)
    _archive(target / "estimator.zip")


def _archive(target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(ESTIMATOR.rglob("*")):
            inside = path.relative_to(ESTIMATOR)
            shipped = path.suffix in (".py", ".csv") and not set(inside.parts) & set(NOT_SHIPPED)
            if shipped:
                member = zipfile.ZipInfo(str(ESTIMATOR.name / inside), EPOCH)
                member.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(member, path.read_bytes())


def _pyodide() -> Path:
    """The folder of Pyodide's files, fetched where it isn't there."""
    modules = HERE / "node_modules"
    if not (modules / "pyodide").is_dir():
        with tempfile.TemporaryDirectory(dir=HERE) as name:
            _fetch(Path(name))
            try:
                (Path(name) / "node_modules").rename(modules)
            except OSError:
                if not (modules / "pyodide").is_dir():  # else another build was faster
                    raise
    return modules / "pyodide"


def _fetch(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(HERE / name, folder / name)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_S, check=True)
    except FileNotFoundError:
        raise PluginError("The planner's page needs npm, which is not here: install Node.js.") from None
    except subprocess.CalledProcessError as error:
        raise PluginError(f"The planner's page: npm cannot fetch Pyodide: {error.stderr.strip()}") from None
    except subprocess.TimeoutExpired:
        raise PluginError(f"The planner's page: npm has not fetched Pyodide in {FETCH_S} s.") from None
