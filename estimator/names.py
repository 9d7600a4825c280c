"""Suggestions for a name that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from estimator.errors import UserError
from estimator.option_names import option_name, setting_for_alias


def close_matches(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to ``n`` known names that are similar to ``name``, the most similar first.

    Case is ignored. ``cutoff``: the least similarity, from 0 to 1 (difflib.SequenceMatcher.ratio).
    """
    import difflib  # only an error needs it

    names = {name.lower(): name for name in known}
    return [names[key] for key in difflib.get_close_matches(name.lower(), names, n=n, cutoff=cutoff)]


def check_options(arguments: Iterable[str], known: Collection[str]) -> None:
    """Raise UserError for the first option on a command line that is none of ``known``.

    The advice is the option for a setting that other tools call so, otherwise options with a similar name.
    """
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in known:
            continue
        setting = setting_for_alias(name)
        option = None if setting is None else option_name(setting)
        if option is not None and option != name and option in known:
            raise UserError(f"There is no option {name}.", f"Did you mean {option}?")
        advice = did_you_mean(name, known) or "`--help` lists the options."
        raise UserError(f"There is no option {name}.", advice)


def unknown_choice(label: str, value: object, choices: Iterable[str]) -> UserError:
    """Error for a value that is none of the choices; ``label`` names the option and its value."""
    names = tuple(choices)
    advice = f"{did_you_mean(value, names)} Choose one of {', '.join(names)}."
    return UserError(f"{label} is not known.", advice.lstrip())


def did_you_mean(
    name: object, known: Iterable[str], n: int = 3, *, shown: Mapping[str, str] | None = None
) -> str:
    """Ask "Did you mean a, b?" with up to ``n`` known names that begin with ``name`` or are similar to it.

    Empty if none is. ``shown``: display text of each known name, if it differs.
    """
    suggestions = similar_names(name, known, n, shown=shown)
    return f"Did you mean {', '.join(suggestions)}?" if suggestions else ""


def similar_names(
    name: object, known: Iterable[str], n: int = 3, *, shown: Mapping[str, str] | None = None
) -> list[str]:
    """Return up to ``n`` known names (or their ``shown`` text) that begin with ``name`` or are similar."""
    text = str(name).strip()
    names = list(known)
    similar = [candidate for candidate in names if text and candidate.lower().startswith(text.lower())]
    similar += close_matches(text, names, n)
    return list(dict.fromkeys(shown[candidate] if shown else candidate for candidate in similar))[:n]
