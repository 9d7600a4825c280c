"""Settings from a YAML file, options and ``--set``, with errors that name the key and the value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from estimator.errors import UserError
from estimator.names import similar_names
from estimator.option_names import setting_for_alias
from estimator.untrusted import parse_yaml as parse_yaml_text
from estimator.untrusted import yaml_loader
from launchers.settings import deepspeed_file
from launchers.settings.description import dotted_names
from launchers.settings.fields import Settings


class _PlainLoader(yaml_loader()):  # type: ignore[misc]
    """YAML loader that reads 20:23 as text instead of a base-60 number (YAML 1.1)."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and isinstance(value, str) and ":" in value and implicit != (False, False):
            return "tag:yaml.org,2002:str"
        return tag


class _UniqueKeyLoader(_PlainLoader):
    """YAML loader that raises UserError for duplicate keys; PyYAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        line_of_key: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused by SafeLoader
            line = key.start_mark.line + 1
            if key.value in line_of_key:
                raise UserError(
                    f"The settings file has `{key.value}` twice, "
                    f"in lines {line_of_key[key.value]} and {line}.",
                    "Remove one of them.",
                )
            line_of_key[str(key.value)] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# Settings that may contain the path of an input file or folder
_INPUTS = (
    "model",
    "dataset",
    "evaluation.dataset",
    "rl.reward",
    "rejection.score",
    "zero.config",
    "resources.pod_template",
    "images.clip_model",
)


def read_file(file: Path) -> dict[str, Any]:
    """Read and check a settings file (:func:`parse_yaml`); raises UserError if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read the settings file {file}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The settings file {file} is not UTF-8 text.") from None
    return parse_file(text, file)


def parse_file(text: str, file: Path) -> dict[str, Any]:
    """Parse the text of ``file``, as :func:`parse_yaml`; raises UserError if it has no settings."""
    values = parse_yaml(text, file.parent)
    if not values:
        raise UserError(
            f"The settings file {file} has no settings.",
            "Write `key: value` lines, such as `model: llama-8b`, or omit the file.",
        )
    return values


def parse_yaml(text: str, folder: Path = Path()) -> dict[str, Any]:
    """Parse and check the text of a settings file; return only the settings that it contains.

    ``folder``: where the file is. A relative path of an input (dataset, model, scorer) that exists in
    ``folder`` is replaced by its path from the working folder; other paths stay relative to the working
    folder. Raises UserError that names the invalid key.
    """
    try:
        values = parse_yaml_text(text, _UniqueKeyLoader) or {}
    except yaml.YAMLError as error:
        problem = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise UserError(
            f"The settings file is not YAML: {problem}.",
            "Write `key: value` lines; nested keys need indentation.",
        ) from None
    if not isinstance(values, dict):
        raise UserError("The settings file must hold `key: value` lines at its top level.")
    if folder != Path():
        _resolve_inputs(values, folder)
    return build(values).model_dump(mode="json", exclude_unset=True)


def _resolve_inputs(values: dict[str, Any], folder: Path) -> None:
    """Replace input paths in ``values``, in place, by paths in ``folder`` if they exist there."""
    for name in _INPUTS:
        *sections, last = name.split(".")
        section: Any = values
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(last), str):
            section[last] = _path_from(folder, section[last])
    if isinstance(values.get("mixture"), dict):
        values["mixture"] = {
            _path_from(folder, name) if isinstance(name, str) else name: weight
            for name, weight in values["mixture"].items()
        }
    harness = values.get("harness")
    if isinstance(harness, dict) and isinstance(harness.get("tasks"), list):
        harness["tasks"] = [
            _path_from(folder, task) if isinstance(task, str) else task for task in harness["tasks"]
        ]


def _path_from(folder: Path, value: str) -> str:
    """Return ``folder/value`` if it exists, else ``value``; ``#split`` or ``:function`` may follow."""
    names = {value, value.rpartition("#")[0], value.rpartition(":")[0]} - {""}
    exists = any((folder / name).exists() for name in names if "\n" not in name)
    return str(folder / value) if exists and not Path(value).is_absolute() else value


def build(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Build settings from a nested mapping, ``flags`` by dotted name, and ``a.b=value`` overrides.

    Overrides take precedence over flags, and flags over the mapping. Raises UserError that lists every
    invalid key or value.
    """
    merged: dict[str, Any] = json.loads(json.dumps(values, default=str))  # converts YAML dates to text
    merged = overlay(_pop_deepspeed_file(merged), merged)
    user_values: dict[str, Any] = {}
    for name, value in (flags or {}).items():
        _assign(user_values, name.split("."), value)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not (separator and name.strip()):
            missing = "the name before `=` is missing" if separator else "`=` is missing"
            raise UserError(f"--set {override}: {missing}.", "Write --set optimizer.lr=2e-5")
        _assign(user_values, name.strip().split("."), _parse_value(override, text))
    merged = overlay(overlay(merged, _pop_deepspeed_file(user_values)), user_values)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise UserError(*_explain(error)) from None


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``top`` over ``base``, section by section."""
    merged = dict(base)
    for key, value in top.items():
        base_value = merged.get(key)
        nested = isinstance(base_value, dict) and isinstance(value, dict)
        merged[key] = overlay(base_value, value) if nested else value  # type: ignore[arg-type]
    return merged


def _pop_deepspeed_file(values: dict[str, Any]) -> dict[str, Any]:
    """Remove `zero.config` from ``values``, and return the settings of the DeepSpeed file it names."""
    zero = values.get("zero")
    path = zero.pop("config", None) if isinstance(zero, dict) else None
    return deepspeed_file.settings_of(str(path)) if path else {}


def _parse_value(override: str, text: str) -> Any:
    """Parse the value of a ``--set`` override as YAML; raises UserError."""
    try:
        value = _PlainLoader(text).get_single_data() if text.strip() else None
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(
            f"--set {override}: the value is not valid YAML: {problem}.",
            "Close its brackets, or put quotes around text.",
        ) from None
    if isinstance(value, str) and not text.strip().startswith(('"', "'")):  # YAML 1.1 reads 2e-5 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value of nested mappings in place, and create missing sections."""
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {'.'.join(path)}: {key} is a value, not a section.")
    values[path[-1]] = value


def _explain(error: ValidationError) -> tuple[str, str]:
    """Convert pydantic's errors to one problem line and advice."""
    rules_by_name: dict[str, list[str]] = {}  # violated rules by setting; a union has one error per type
    suggestions: list[str] = []
    for item in error.errors():
        path = list(map(str, item["loc"]))
        # pydantic's locations also contain the types it tried, e.g. a.int
        setting_parts = (part for part in path if part.isalnum() or part.isidentifier())
        name = ".".join(part for part in setting_parts if part not in ("bool", "float", "int", "str"))
        if item["type"] == "extra_forbidden":
            name = ".".join(path)
            alias = setting_for_alias(name)
            rules_by_name[f"unknown setting `{name}`"] = []
            suggestions += [alias] if alias else similar_names(name, dotted_names())
        elif item["type"] == "missing":  # an item of a tuple: no setting is required
            rules_by_name[f"{name.rpartition('.')[0]} = {item['input']!r} has too few values"] = []
        elif not name or (item["type"] == "value_error" and isinstance(item["input"], dict)):
            # Raised by a validator of a section
            rules_by_name[f"{name}: {item['msg']}".removeprefix(": ").replace("Value error, ", "")] = []
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            if item["type"] in ("model_type", "dataclass_type"):
                keys = [key for key in dotted_names() if key.startswith(f"{name}.")]
                message = f"a section, with {', '.join(keys)}"
            elif item["type"] == "string_too_short":
                message = "text that is not empty"
            elif item["type"] == "literal_error" and isinstance(item["input"], str):
                choices = re.findall("'([^']*)'", item["ctx"]["expected"])
                suggestions += similar_names(item["input"], choices)
            rules_by_name.setdefault(f"{name} = {item['input']!r}", []).append(message.split(", unable")[0])
    lines = [
        f"{subject}: should be {' or '.join(rules)}" if rules else subject
        for subject, rules in rules_by_name.items()
    ]
    advice = f"Did you mean {', '.join(dict.fromkeys(suggestions))}?" if suggestions else ""
    return f"settings: {'; '.join(lines)}.", advice
