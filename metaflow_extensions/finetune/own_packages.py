"""Whether the packages of this project are its own: others install packages of the same names.

``flows``, ``decorators`` and ``estimator`` are names on PyPI, too, and of folders beside people's flows. One
that comes first on the path, or was installed over ours, is said in two lines instead of met as a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

ALL = ("checklist", "decorators", "estimator", "flows", "launchers")
ROOT = Path(__file__).resolve().parents[2]  # holds all of them: site-packages, a clone, a task's code package
MARK = "METAFLOW_PACKAGE_POLICY"  # in each __init__.py of ours, and hardly in a stranger's
MISTAKE = 2  # that of estimator/errors.py, which can't be imported before it is known to be ours


def foreign(names: Iterable[str] = ALL) -> tuple[str, str] | None:
    """Return the problem of the first package that is not ours, and what to do; None if all are ours."""
    for name in names:
        own = ROOT / name / "__init__.py"
        found = _origin(name)
        if not own.is_file():
            return (
                f"metaflow-finetune is damaged: {own} is gone, removed with another package named {name}.",
                _again(name),
            )
        if found is not None and found.resolve() == own:
            if MARK not in own.read_text(encoding="utf-8", errors="replace"):
                return (
                    f"metaflow-finetune is damaged: another package named {name} was installed over {own}.",
                    _again(name),
                )
        else:
            return (
                f"`import {name}` finds {found or 'a folder'}, which is not metaflow-finetune's {name}.",
                "Rename it, or run this where it is not on Python's path (PYTHONPATH, the flow's folder).",
            )
    return None


def end_where_foreign(names: Iterable[str] = ALL) -> None:
    """End the program in two lines where one of these packages isn't ours."""
    wrong = foreign(names)
    if wrong is not None:
        print(*wrong, sep="\n", file=sys.stderr)
        raise SystemExit(MISTAKE)


def _again(name: str) -> str:
    return (
        f"pip uninstall {name}; pip install --force-reinstall --no-deps metaflow-finetune; "
        f"{name} needs an environment of its own."
    )


def _origin(name: str) -> Path | None:
    """The file that an import of that name would run, or has run; None: a folder without one."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return Path(loaded.__file__) if loaded.__file__ else None
    spec = find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None
