"""What gives answers their scores: a function of the user's, or else a reward model.

The function is the user's code: whatever it does wrong is said in a line.
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
    """What a setting names that says how answers are scored."""

    score: str  # as it was given
    function: str | None = None  # None: a reward model
    module: str = ""  # of the function, or its file
    file: str | None = None  # where the module is a file


def scorer_of(score: str) -> Scorer:
    """What the value of such a setting names: ``x.py:f`` and ``a.b:f`` are functions, all else is a model."""
    found = _FUNCTION.fullmatch(score)
    if found is None:
        return Scorer(score=score)
    module = found["module"]
    is_file = module.endswith(".py")
    return Scorer(score=score, function=found["name"], module=module, file=module if is_file else None)


def load_function(function: str, shown: str) -> ScoringFunction:
    """The function that ``file.py:name`` or ``module:name`` names; ``shown``: what errors call it.

    Raises UserError where there is no such file, module or function, or where its code raises.
    """
    scorer = scorer_of(function)
    if scorer.file is not None and not Path(scorer.file).expanduser().is_file():
        raise UserError(f"Scoring function {shown}: there is no file {scorer.file}.")
    try:
        module = (
            importlib.import_module(scorer.module)
            if scorer.file is None
            else _module_of(Path(scorer.file).expanduser())
        )
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        raise UserError(f"Scoring function {shown} can't be imported: {_in_a_line(error)}.") from None
    found = getattr(module, scorer.function or "", None)
    if not callable(found):
        raise UserError(f"Scoring function {shown}: there is no function {scorer.function} in it.")
    loaded: ScoringFunction = found
    return loaded


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"scoring_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def score_by(function: ScoringFunction, shown: str, prompt: str, answer: str) -> float:
    """The function's score. Raises UserError where it raises, or returns anything but a finite number."""
    given = f"for the answer {_shortened(answer)!r} to the prompt {_shortened(prompt)!r}"
    again = "Mend it. A run that has begun goes on with what it has finished: `resume`."
    value: Any
    try:
        value = function(prompt, answer)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        raise UserError(f"Scoring function {shown} raised {_in_a_line(error)}, {given}.", again) from None
    if hasattr(value, "item"):  # numpy's and torch's numbers
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(
            f"Scoring function {shown} returned {_shortened(repr(value))}, which is no number, {given}.",
            again,
        )
    if not math.isfinite(value):
        raise UserError(f"Scoring function {shown} returned {value}, {given}.", again)
    return float(value)


def _shortened(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 4]} ..."


def _in_a_line(error: BaseException) -> str:
    return _shortened(f"{type(error).__name__}: {error}", 200)
