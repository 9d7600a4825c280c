"""The user's patch of the training pods (``resources.pod_template``), read and validated at launch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from decorators.backends import tables
from decorators.backends.strategic_merge import DIRECTIVE
from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.untrusted import MAX_YAML_BYTES, parse_yaml, read_text

NAME = "resources.pod_template"
_QUANTITIES = ("limits", "requests")  # their values may be numbers
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
_TYPE_NAMES = {
    "str": "text (in quotes)",
    "int": "a whole number",
    "bool": "true or false",
    "float": "a number",
}
_EXAMPLE = 'Write a patch of a pod template, for example {"spec": {"hostNetwork": true}}.'


def read(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read a patch from a mapping or from the path of a YAML file.

    Raises UserError if it cannot be read or does not match the Kubernetes client's model of pod templates.
    """
    where = NAME
    if isinstance(value, str):
        where = f"{NAME} {value}"
        try:
            value = parse_yaml(read_text(Path(value).expanduser(), MAX_YAML_BYTES))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            problem = f"{where} is not YAML: {' '.join(str(error).split())}."
            raise UserError(problem, "Correct the file.") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte in its path
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{where} cannot be read: {reason}.", "Name a YAML file.") from None
    if not isinstance(value, Mapping) or not value:
        raise UserError(f"{where} must be a mapping.", _EXAMPLE)
    patch = dict(value)
    _check(patch, "V1PodTemplateSpec", "", where)
    _check_text(patch, where)
    return patch


def _check_text(patch: Mapping[str, Any], where: str) -> None:
    """Raise UserError for text that no API server accepts: null bytes, and halves of surrogate pairs."""
    text = json.dumps(patch, ensure_ascii=False, default=str)
    if "\\u0000" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where} holds text with a null byte or half a surrogate pair.", "Remove it.")


def _check(value: Any, kind: str, path: str, where: str) -> None:
    if value is None:  # null removes the field
        return
    if item := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        _check_list(value, item[1], path, where)
    elif value_type := re.fullmatch(r"[dD]ict[\[(]str, (.+)[\])]", kind):
        if not isinstance(value, Mapping):
            raise _wrong(where, path, "a mapping", value)
        for name, item in value.items():
            if not (path.rpartition(".")[2] in _QUANTITIES and isinstance(item, int | float)):
                _check(item, value_type[1], f"{path}.{name}", where)
    elif kind in _PLAIN:
        bool_for_number = isinstance(value, bool) and kind != "bool"
        if not isinstance(value, _PLAIN[kind]) or bool_for_number:
            raise _wrong(where, path, _TYPE_NAMES[kind], value)
    elif re.match(r"V\d", kind):
        _check_object(value, kind, path, where)


def _check_object(value: Any, kind: str, path: str, where: str) -> None:
    from kubernetes import client

    if not isinstance(value, Mapping):
        raise _wrong(where, path, "a mapping", value)
    model = getattr(client, kind)
    types = {model.attribute_map[name]: field_type for name, field_type in model.openapi_types.items()}
    for name, field_type in value.items():
        if str(name).startswith("$"):
            continue
        if name not in types:
            raise UserError(
                f"{where}: {path + '.' if path else ''}{name} is not a field of a pod template.",
                did_you_mean(name, types, 1) or f"Fields: {', '.join(sorted(types))}.",
            )
        _check(field_type, types[name], f"{path}.{name}" if path else str(name), where)


def _check_list(value: Any, kind: str, path: str, where: str) -> None:
    if not isinstance(value, list):
        raise _wrong(where, path, "a list", value)
    key = tables.merge_keys().get(path.rpartition(".")[2])
    for number, item in enumerate(value):
        item_path = f"{path}[{number}]"
        _check(item, kind, item_path, where)
        if key and item != {DIRECTIVE: "replace"} and key not in (item or {}):
            main = path == "spec.containers"
            advice = "The training container is called main." if main else "It identifies the item."
            raise UserError(f"{where}: {item_path} has no {key}.", advice)


def _wrong(where: str, path: str, expected: str, value: Any) -> UserError:
    return UserError(f"{where}: {path or 'it'} is {value!r}, and must be {expected}.", "Correct this value.")
