"""Tasks of ``harness.tasks``: names known to lm-evaluation-harness, and the user's YAML files.

A user's file refers to data relative to its own folder, which contains everything it needs: data files,
included files, Python files with functions. So it can be sent along with a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.terminal import print
from estimator.untrusted import MAX_YAML_BYTES, parse_yaml, read_text, yaml_loader
from launchers.settings import Settings

PACKAGE = "lm_eval"
_EXAMPLES = "https://github.com/EleutherAI/lm-evaluation-harness, docs/new_task_guide.md"
SUFFIXES = (".yaml", ".yml")


class _Loader(yaml_loader()):  # type: ignore[misc]
    """Loader for the harness's YAML, which keeps ``!function module.name`` as a :class:`_Function`."""


class _Function(str):
    """``module.name`` of a function in the YAML file's folder."""

    __slots__ = ()


_Loader.add_constructor("!function", lambda _, node: _Function(node.value))


def is_file(task: str) -> bool:
    """Whether a task is a user's file or folder instead of a name."""
    return task.endswith(SUFFIXES) or "/" in task or Path(task).is_dir()


def check(settings: Settings) -> None:
    """Raise UserError for invalid tasks: settings, files, names.

    Names are looked up only if the harness is installed; this takes about ten seconds.
    """
    tasks = settings.harness.tasks
    if not tasks:
        return
    if settings.task == "reward":
        raise UserError(
            "harness.tasks: a model of --task reward generates no answers.",
            "Remove harness.tasks.",
        )
    for task in tasks:
        if is_file(task):
            for file in yaml_files(Path(task).expanduser()):
                files_of(file)
    if importlib.util.find_spec(PACKAGE) is not None:
        _check_names([task for task in tasks if not is_file(task)])


def check_installed(settings: Settings) -> None:
    """Raise UserError if tasks are configured but the harness is not installed."""
    if settings.harness.tasks and importlib.util.find_spec(PACKAGE) is None:
        raise UserError("harness.tasks: lm-evaluation-harness is not installed.", "pip install -e '.[eval]'")


def _check_names(names: Sequence[str]) -> None:
    if not names:
        return
    print(f"looking up {', '.join(names)} among lm-evaluation-harness's tasks", flush=True)
    from lm_eval.tasks import TaskManager

    known_tasks = TaskManager().all_tasks
    for name in names:
        if name not in known_tasks:
            suggestion = did_you_mean(name, known_tasks) or "`lm-eval ls tasks` lists them."
            raise UserError(
                f"harness.tasks: lm-evaluation-harness has no task {name}.",
                f"{suggestion} Custom tasks are YAML files: {_EXAMPLES}.",
            )


def yaml_files(path: Path) -> list[Path]:
    """List the task files of a YAML file or a folder, without files that are only included by others."""
    if not path.exists():
        raise UserError(
            f"harness.tasks: there is no file or folder {path}.", f"How to write one: {_EXAMPLES}."
        )
    if path.is_file():
        if not isinstance(_read(path).get("task"), str):
            raise _invalid(path, "it has no `task: NAME`; for a group, use the folder of its tasks")
        return [path]
    candidates = sorted(candidate for candidate in path.rglob("*") if candidate.suffix in SUFFIXES)
    files = [candidate for candidate in candidates if isinstance(_read(candidate).get("task"), str)]
    if not files:
        raise UserError(
            f"harness.tasks: no YAML file in {path} has a `task: NAME`.", f"How to write one: {_EXAMPLES}."
        )
    return files


def files_of(file: Path) -> list[Path]:
    """List a task's file and all files it needs: included files, data, modules of functions.

    Raises UserError for a missing file.
    """
    includes, values = _resolve_includes(file)
    if not isinstance(values.get("dataset_path"), str) and not isinstance(
        values.get("custom_dataset"), _Function
    ):
        raise _invalid(file, "it has no `dataset_path`, such as json")
    try:
        includes += _data_files(file, values)
    except (OSError, ValueError, NotImplementedError) as error:  # e.g. a name that is too long, a bad pattern
        raise _invalid(file, f"its data files cannot be looked for ({error!s:.200})") from None
    for function in _functions(values):
        module = file.parent / f"{function.rpartition('.')[0].replace('.', '/')}.py"
        if module.is_file():  # else the module must be installed
            includes.append(module)
    return list(dict.fromkeys(includes))


def _resolve_includes(file: Path, ancestors: tuple[Path, ...] = ()) -> tuple[list[Path], dict[str, Any]]:
    """Return the file with all included files, and their values; those of the file take precedence."""
    values, ancestors = _read(file), (*ancestors, file.resolve())
    files: list[Path] = [file]
    merged: dict[str, Any] = {}
    for name in _texts(values.pop("include", None)):
        included = file.parent / name
        if not included.is_file():
            raise _invalid(file, f"it includes {name}, which is not in its folder")
        if included.resolve() in ancestors:
            raise _invalid(file, f"it includes {name}, which includes it")
        other_files, other_values = _resolve_includes(included, ancestors)
        files += other_files
        merged |= other_values
    return files, merged | values


def _data_files(file: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """Iterate over the local data files of a task."""
    folder = file.parent / str(values.get("dataset_path", ""))
    if values.get("dataset_path") and folder.is_dir():
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
    options = values.get("dataset_kwargs")
    data_files = options.get("data_files") if isinstance(options, dict) else None
    for name in _texts(data_files):
        if "://" in name:
            continue
        paths = [file.parent / name] if (file.parent / name).is_file() else _matching(file.parent, name)
        if not paths:
            raise _invalid(file, f"there is no {name}; relative names start at the folder of this file")
        yield from paths


def _matching(folder: Path, pattern: str) -> list[Path]:
    absolute = Path(pattern).is_absolute()
    return [] if absolute else sorted(path for path in folder.glob(pattern) if path.is_file())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))


def _functions(value: Any) -> Iterator[_Function]:
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _functions(item)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = parse_yaml(read_text(file, MAX_YAML_BYTES), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _invalid(file, " ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise _invalid(file, "it has no `key: value` lines")
    return values


def _invalid(file: Path, problem: str) -> UserError:
    return UserError(f"Task {file} cannot be used: {problem}.", f"How to write one: {_EXAMPLES}.")


def portable(task: str) -> dict[str, Path]:
    """Return all files that a user's task needs, by name relative to its folder.

    Raises UserError for a file outside of that folder.
    """
    path = Path(task).expanduser().resolve()
    root = path if path.is_dir() else path.parent
    files: dict[str, Path] = {}
    for file in yaml_files(path):
        for source in files_of(file):
            absolute = source.resolve()
            if not absolute.is_relative_to(root):
                raise UserError(
                    f"Task {file} needs {source}, which is outside {root} and cannot be sent with the run.",
                    "Move it into the folder of the task's file, and use a relative name.",
                )
            files[str(absolute.relative_to(root))] = absolute
    return files
