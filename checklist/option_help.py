"""Help page of the checklist: its options grouped by purpose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checklist.options import flags, help_of, type_of
from estimator.cli.help import Line, page

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

SUMMARY = "Test whether a cluster is fit for training, and name the node, link, direction or GPU at fault."
GROUPS: dict[str, tuple[str, ...]] = {
    "What to check": ("profile", "nodes", "gpus_per_node", "device", "only", "skip", "suspects"),
    "Where": (
        *("instance_type", "queue", "priority_class", "fabric", "pod_template"),
        *("directory", "datastore", "node_name", "cluster", "context"),
    ),
    "Expected values": (
        *("thresholds", "system", "expect", "reference_node", "reference_settings"),
        *("history", "accept_baseline"),
    ),
    "Time limits": ("timeout", "op_timeout", "start_timeout", "pending_timeout"),
    "Output": ("json", "keep", "webhook", "prometheus", "pushgateway", "cloudwatch"),
    "Marks on Kubernetes nodes": ("label", "taint", "apply", "most_share"),
}
"""Options in the order of the page; a command shows those that it has."""
RARE = frozenset(
    (
        *("suspects", "priority_class", "pod_template", "system", "reference_node", "reference_settings"),
        *("accept_baseline", "op_timeout", "start_timeout", "pushgateway", "cloudwatch", "most_share"),
    )
)
"""Options that only the page with all options shows, for commands that have two pages."""
_METAVARS = {
    "datastore": "FOLDER",
    "directory": "FOLDER",
    "keep": "FOLDER",
    "expect": "GB/S",
    "device": "DEVICE",
    "fabric": "FABRIC",
    "instance_type": "TYPE",
    "pending_timeout": "MINUTES",
    "pushgateway": "URL",
    "cloudwatch": "FILE",
    "most_share": "FRACTION",
    "pod_template": "FILE",
    "profile": "PROFILE",
}
_METAVARS_BY_TYPE = {int: "N", float: "SECONDS", tuple: "NAMES", Path: "FILE", str: "NAME"}


def help_page(
    usage: str,
    options: type[BaseModel],
    *,
    example: str,
    more: Mapping[str, Sequence[Line]] | None = None,
    closing: Sequence[str] = (),
    hidden: Collection[str] = (),
) -> str:
    """Format the help of a command with these options.

    ``more``: other options, first in their groups. ``hidden``: options that are left out.
    """
    fields = {name: field for name, field in flags(options).items() if name not in hidden}
    groups = {
        group: [_line(name, fields[name]) for name in names if name in fields]
        for group, names in GROUPS.items()
    }
    extended = {name: [*lines, *groups.get(name, ())] for name, lines in (more or {}).items()}
    return page(usage, SUMMARY, groups | extended, example=example, closing=closing)


def _line(name: str, field: FieldInfo) -> Line:
    option, kind, text = f"--{name.replace('_', '-')}", type_of(field), help_of(field)
    if kind is bool:
        return Line(names=option, text=text)
    text, _, default = text.partition(" (default: ")
    shown = "" if field.default in (None, ()) else str(field.default)
    return Line(
        names=f"{option} {_METAVARS.get(name) or _METAVARS_BY_TYPE[kind]}",
        text=text,
        default=default.removesuffix(")") or shown,
    )
