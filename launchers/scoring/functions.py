"""Scorers of answers: a user's Python function, or a reward model.

Any error in the user's function is reported in one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.errors import UserError

ScoringFunction = Callable[[str, str], float]
_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Parsed value of a setting that names a scorer."""

    score: str  # value of the setting
    function: str | None = None  # None: a reward model
    module: str = ""  # module of the function, or its file
    file: str | None = None  # set if the module is a file


def scorer_of(score: str) -> Scorer:
    """Parse the setting: ``x.py:f`` and ``a.b:f`` are functions, everything else is a model."""
    match = _FUNCTION.fullmatch(score)
    if match is None:
        return Scorer(score=score)
    module = match["module"]
    is_file = module.endswith(".py")
    return Scorer(score=score, function=match["name"], module=module, file=module if is_file else None)


def load_function(function: str, name: str) -> ScoringFunction:
    """Load the function ``file.py:name`` or ``module:name``; ``name``: its name in error messages.

    Raises UserError if there is no such file, module or function, or if its code raises.
    """
    scorer = scorer_of(function)
    if scorer.file is not None and not Path(scorer.file).expanduser().is_file():
        raise UserError(f"Scoring function {name}: there is no file {scorer.file}.")
    try:
        module = (
            importlib.import_module(scorer.module)
            if scorer.file is None
            else _module_of(Path(scorer.file).expanduser())
        )
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        raise UserError(f"Scoring function {name} cannot be imported: {_in_a_line(error)}.") from None
    attribute = getattr(module, scorer.function or "", None)
    if not callable(attribute):
        raise UserError(f"Scoring function {name}: there is no function {scorer.function} in it.")
    loaded: ScoringFunction = attribute
    return loaded


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"scoring_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def score_by(function: ScoringFunction, name: str, prompt: str, answer: str) -> float:
    """Call the function. Raises UserError if it raises, or returns anything but a finite number."""
    context = f"for the answer {_shortened(answer)!r} to the prompt {_shortened(prompt)!r}"
    advice = "Fix the function; `resume` then continues a started run."
    value: Any
    try:
        value = function(prompt, answer)
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        raise UserError(f"Scoring function {name} raised {_in_a_line(error)}, {context}.", advice) from None
    if hasattr(value, "item"):  # numpy's and torch's numbers
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(
            f"Scoring function {name} returned {_shortened(repr(value))}, which is not a number, {context}.",
            advice,
        )
    if not math.isfinite(value):
        raise UserError(f"Scoring function {name} returned {value}, {context}.", advice)
    return float(value)


def _shortened(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 4]} ..."


def _in_a_line(error: BaseException) -> str:
    return _shortened(f"{type(error).__name__}: {error}", 200)
