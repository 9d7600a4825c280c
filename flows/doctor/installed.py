"""Installed versions: this package, Python, Metaflow, torch, transformers, and the extras."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flows.doctor.line import Line

US = "metaflow-finetune"
_SHOWN = ("metaflow", "torch", "transformers")
_NOT_FOR_USERS = ("dev",)


def packages() -> list[Line]:
    """Check that installed versions meet the requirements of this package."""
    requirements = [item for item in _requirements() if item.marker is None]
    wrong = _unmet(requirements)
    fix = f"pip install '{US}'"
    state = Line(check=US, state="ok", found=version(US))
    if wrong:
        state = Line(check=US, state="no", found=f"{version(US)}, but {'; '.join(wrong)}", fix=fix)
    lines = [state, _python()]
    for name in _SHOWN:
        found = _version(name)
        if found is not None:
            lines.append(Line(check=name, state="ok", found=found))
        else:
            fix = fix if name == "metaflow" else _install("train")
            lines.append(Line(check=name, state="no", found="not installed", fix=fix))
    return lines


def extras() -> list[Line]:
    """Check the extras: one line for installed and optional ones, and one per extra with a wrong version."""
    names = [name for name in metadata(US).get_all("Provides-Extra") or [] if name not in _NOT_FOR_USERS]
    wrong = {name: _unmet(list(_extra_requirements(name))) for name in names}
    complete = [name for name, problems in wrong.items() if not problems]
    # An extra with a missing package was not requested, or is not usable here
    optional = [
        name
        for name, problems in wrong.items()
        if problems and all(problem.startswith("not installed") for problem in problems)
    ]
    found = ", ".join(complete) or "none"
    if optional:
        found += f"; optional: {', '.join(optional)} ({_install('NAME')})"
    lines = [Line(check="extras", state="ok", found=found)]
    lines += [
        Line(check=f"extra {name}", state="no", found="; ".join(problems), fix=_install(name))
        for name, problems in wrong.items()
        if name not in (*complete, *optional)
    ]
    return lines


def _python() -> Line:
    required, found = metadata(US)["Requires-Python"], platform.python_version()
    if SpecifierSet(required).contains(found):
        return Line(check="Python", state="ok", found=found)
    return Line(
        check="Python",
        state="no",
        found=f"{found}; required: {required}",
        fix="Create an environment with a supported version",
    )


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in requires(US) or []]


def _extra_requirements(extra: str) -> Iterator[Requirement]:
    """Yield an extra's requirements on this Python and system, without the package's own."""
    for item in _requirements():
        marker = item.marker
        if marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": extra}):
            yield item


def _unmet(requirements: list[Requirement]) -> list[str]:
    """List the requirements that are missing or installed in another version."""
    versions = {item.name: _version(item.name) for item in requirements}
    missing = [name for name, installed in versions.items() if installed is None]
    problems = [f"not installed: {', '.join(missing)}"] if missing else []
    for item in requirements:
        installed = versions[item.name]
        if installed is not None and not item.specifier.contains(installed, prereleases=True):
            problems.append(f"{item.name} {installed}; required: {item.specifier}")
    return problems


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    return f"pip install '{US}[{extra}]'"
