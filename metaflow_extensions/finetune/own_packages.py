"""Check that imports of this project's packages are not shadowed by other packages of the same names.

``flows``, ``decorators`` and ``estimator`` also exist on PyPI and as folders next to users' flows. If one of
them precedes this project's package on the path or was installed over it, the user gets two lines instead of
a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

ALL = ("checklist", "decorators", "estimator", "flows", "launchers")
ROOT = Path(__file__).resolve().parents[2]  # parent folder: site-packages, a clone, or a task's code package
MARK = "METAFLOW_PACKAGE_POLICY"  # in each __init__.py of this project, and unlikely in others
EXIT_STATUS = 2  # USER_ERROR_STATUS of estimator/errors.py, which cannot be imported before this check


def find_problem(names: Iterable[str] = ALL) -> tuple[str, str] | None:
    """Return (problem, advice) for the first shadowed or damaged package; None if all are intact."""
    for name in names:
        expected = ROOT / name / "__init__.py"
        imported = _origin(name)
        if not expected.is_file():
            return (
                f"metaflow-finetune is damaged: {expected} is missing. "
                f"It may have been removed with another package named {name}.",
                _reinstall_command(name),
            )
        if imported is not None and imported.resolve() == expected:
            if MARK not in expected.read_text(encoding="utf-8", errors="replace"):
                return (
                    f"metaflow-finetune is damaged: another package named {name} has overwritten {expected}.",
                    _reinstall_command(name),
                )
        else:
            return (
                f"`import {name}` finds {imported or 'a folder'}, which is not metaflow-finetune's {name}.",
                "Rename the other package, or remove it from Python's path (PYTHONPATH, the flow's folder).",
            )
    return None


def exit_if_shadowed(names: Iterable[str] = ALL) -> None:
    """Exit with two lines if one of these packages is shadowed or damaged."""
    wrong = find_problem(names)
    if wrong is not None:
        print(*wrong, sep="\n", file=sys.stderr)
        raise SystemExit(EXIT_STATUS)


def _reinstall_command(name: str) -> str:
    return (
        f"pip uninstall {name}; pip install --force-reinstall --no-deps metaflow-finetune; "
        f"use a separate environment for {name}."
    )


def _origin(name: str) -> Path | None:
    """Return the file that an import of the name runs; None for a folder without ``__init__.py``."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return Path(loaded.__file__) if loaded.__file__ else None
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None
