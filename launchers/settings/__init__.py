"""Settings of a run and their defaults, set by a YAML file, command-line options and ``--set``."""

from launchers.settings.description import (
    SCHEMA_FILE,
    annotation_of,
    choices_of,
    default_of,
    dotted_names,
    flat,
    help_of,
    json_schema,
    type_of,
)
from launchers.settings.fields import Settings
from launchers.settings.reading import build, overlay, parse_file, parse_yaml, read_file
from launchers.settings.unused import check_used

__all__ = [
    "SCHEMA_FILE",
    "Settings",
    "annotation_of",
    "build",
    "check_used",
    "choices_of",
    "default_of",
    "dotted_names",
    "flat",
    "help_of",
    "json_schema",
    "overlay",
    "parse_file",
    "parse_yaml",
    "read_file",
    "type_of",
]
