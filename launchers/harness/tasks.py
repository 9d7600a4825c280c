"""The tasks of ``harness.tasks``: names that lm-evaluation-harness knows, and YAML files of the user's own.

A file of the user's names its data relative to its own folder, and has all that it needs there: data files,
what it includes, Python files of its functions. So it can travel with a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from estimator.errors import Change, UserError
from estimator.names import did_you_mean
from launchers.settings import Settings

PACKAGE = "lm_eval"
_EXAMPLES = "https://github.com/EleutherAI/lm-evaluation-harness, docs/new_task_guide.md"
SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """YAML of the harness, whose ``!function module.name`` is left a :class:`_Function`."""


class _Function(str):
    """``module.name`` of a function beside the file."""

    __slots__ = ()


_Loader.add_constructor("!function", lambda _, node: _Function(node.value))


def is_file(task: str) -> bool:
    """Whether a task is a file or folder of the user's, not a name that the harness knows."""
    return task.endswith(SUFFIXES) or "/" in task or Path(task).is_dir()


def check(settings: Settings) -> None:
    """Raise UserError for tasks that can't be run, by what is here: settings, files, names.

    Names are looked up where the harness is installed, which takes some ten seconds.
    """
    tasks = settings.harness.tasks
    if not tasks:
        return
    if settings.task == "reward":
        raise UserError(
            ("harness.tasks: a model of ", Change("task", "reward"), " answers nothing: it gives numbers."),
            "Leave harness.tasks out.",
        )
    for task in tasks:
        if is_file(task):
            for file in yaml_files(Path(task).expanduser()):
                files_of(file)
    if importlib.util.find_spec(PACKAGE) is not None:
        _check_names([task for task in tasks if not is_file(task)])


def check_installed(settings: Settings) -> None:
    """Raise UserError where tasks are asked for and the harness is not here."""
    if settings.harness.tasks and importlib.util.find_spec(PACKAGE) is None:
        raise UserError("harness.tasks: lm-evaluation-harness is not installed.", "pip install -e '.[eval]'")


def _check_names(names: Sequence[str]) -> None:
    if not names:
        return
    print(f"looking up {', '.join(names)} among lm-evaluation-harness's tasks", flush=True)
    from lm_eval.tasks import TaskManager

    known = TaskManager().all_tasks
    for name in names:
        if name not in known:
            suggestion = did_you_mean(name, known) or "`lm-eval ls tasks` lists them."
            raise UserError(
                f"harness.tasks: lm-evaluation-harness has no task {name}.",
                f"{suggestion} A task of your own is a YAML file: {_EXAMPLES}.",
            )


def yaml_files(path: Path) -> list[Path]:
    """The tasks' files of a YAML file or a folder; what is only included by others is none."""
    if not path.exists():
        raise UserError(
            f"harness.tasks: there is no file or folder {path}.", f"How to write one: {_EXAMPLES}."
        )
    if path.is_file():
        if not isinstance(_read(path).get("task"), str):
            raise _wrong(path, "it has no `task: NAME`; of a group, give the folder of its tasks")
        return [path]
    candidates = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
    found = [each for each in candidates if isinstance(_read(each).get("task"), str)]
    if not found:
        raise UserError(
            f"harness.tasks: no YAML file in {path} has a `task: NAME`.", f"How to write one: {_EXAMPLES}."
        )
    return found


def files_of(file: Path) -> list[Path]:
    """A task's file and all that it needs beside it: what it includes, its data, its functions' modules.

    Raises UserError for one that is not there.
    """
    needed, values = _included(file)
    if not isinstance(values.get("dataset_path"), str) and not isinstance(
        values.get("custom_dataset"), _Function
    ):
        raise _wrong(file, "it has no `dataset_path`, such as json")
    needed += _data(file, values)
    for function in _functions(values):
        module = file.parent / f"{function.rpartition('.')[0].replace('.', '/')}.py"
        if module.is_file():  # else it is a module that is installed
            needed.append(module)
    return list(dict.fromkeys(needed))


def _included(file: Path, above: tuple[Path, ...] = ()) -> tuple[list[Path], dict[str, Any]]:
    """The file and those that it includes, and their values, its own laid over the others'."""
    values, above = _read(file), (*above, file.resolve())
    files: list[Path] = [file]
    merged: dict[str, Any] = {}
    for name in _texts(values.pop("include", None)):
        other = file.parent / name
        if not other.is_file():
            raise _wrong(file, f"there is no {name} beside it, which it includes")
        if other.resolve() in above:
            raise _wrong(file, f"it includes {name}, which includes it")
        more, below = _included(other, above)
        files += more
        merged |= below
    return files, merged | values


def _data(file: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """Local data that a task names."""
    folder = file.parent / str(values.get("dataset_path", ""))
    if values.get("dataset_path") and folder.is_dir():
        yield from (each for each in sorted(folder.rglob("*")) if each.is_file())
    options = values.get("dataset_kwargs")
    named = options.get("data_files") if isinstance(options, dict) else None
    for name in _texts(named):
        if "://" in name:
            continue
        found = [file.parent / name] if (file.parent / name).is_file() else _matching(file.parent, name)
        if not found:
            raise _wrong(file, f"there is no {name}; relative names begin at the folder of this file")
        yield from found


def _matching(folder: Path, pattern: str) -> list[Path]:
    absolute = Path(pattern).is_absolute()
    return [] if absolute else sorted(each for each in folder.glob(pattern) if each.is_file())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in _texts(each))


def _functions(value: Any) -> Iterator[_Function]:
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _functions(each)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.load(file.read_text(), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _wrong(file, " ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise _wrong(file, "it holds no `key: value` lines")
    return values


def _wrong(file: Path, what: str) -> UserError:
    return UserError(f"Task {file} can't be used: {what}.", f"How to write one: {_EXAMPLES}.")


def portable(task: str) -> dict[str, Path]:
    """All files that a task of the user's needs, by their names below its own folder.

    Raises UserError for one that lies elsewhere.
    """
    path = Path(task).expanduser().resolve()
    root = path if path.is_dir() else path.parent
    files: dict[str, Path] = {}
    for file in yaml_files(path):
        for needed in files_of(file):
            whole = needed.resolve()
            if not whole.is_relative_to(root):
                raise UserError(
                    f"Task {file} needs {needed}, which is outside of {root} and can't travel with the run.",
                    "Put it beside the task's file, and name it from there.",
                )
            files[str(whole.relative_to(root))] = whole
    return files
