"""Suggestions for a name that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from estimator.changes import Spelling, meant_by
from estimator.errors import UserError


def close_matches(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to ``n`` of the known names that are spelled like ``name``, the most similar first.

    Case is ignored. ``cutoff``: the least similarity, from 0 to 1 (difflib.SequenceMatcher.ratio).
    """
    import difflib  # only an error needs it

    names = {spelling.lower(): spelling for spelling in known}
    return [names[key] for key in difflib.get_close_matches(name.lower(), names, n=n, cutoff=cutoff)]


def check_options(words: Iterable[str], known: Collection[str], spelling: Spelling) -> None:
    """Raise UserError for the first option on a command line that is none of ``known``.

    The advice is this project's name of an option that another tool calls so, else names spelled alike.
    ``known`` may be empty: then only names of other tools are refused.
    """
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if not name.startswith("--") or name in known:
            continue
        option = meant_by(name)
        ours = None if option is None else spelling.name(option)
        if ours is not None and ours != name and (not known or not ours.startswith("--") or ours in known):
            shown = ours if ours.startswith("--") else f"--set {ours}=..."
            raise UserError(f"There is no option {name}.", f"Did you mean {shown}?")
        if known:
            advice = did_you_mean(name, known) or "`--help` lists the options."
            raise UserError(f"There is no option {name}.", advice)


def unknown_choice(what: str, value: object, choices: Iterable[str]) -> UserError:
    """Error for a value that is none of the choices; ``what`` names the option and its value."""
    names = tuple(choices)
    advice = f"{did_you_mean(value, names)} Choose one of {', '.join(names)}."
    return UserError(f"{what} is not known.", advice.lstrip())


def did_you_mean(
    name: object, known: Iterable[str], n: int = 3, *, shown: Mapping[str, str] | None = None
) -> str:
    """Ask "Did you mean a, b?" with up to ``n`` known names that begin with ``name`` or are spelled like it.

    Empty if none is. ``shown``: the text that stands for each of the known names, if it differs.
    """
    text = str(name).strip()
    names = list(known)
    similar = [each for each in names if text and each.lower().startswith(text.lower())]
    similar += close_matches(text, names, n)
    suggestions = list(dict.fromkeys(shown[each] if shown else each for each in similar))[:n]
    return f"Did you mean {', '.join(suggestions)}?" if suggestions else ""
