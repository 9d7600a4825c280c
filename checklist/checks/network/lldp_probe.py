"""Switches at the other end of a host's cables, from the LLDP daemon lldpd where it runs."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from estimator.untrusted import parse_json

TOOL = "lldpctl"
_LIMIT_S = 5.0


def switches() -> tuple[str, ...]:
    """Return the names of the neighboring switches, sorted; empty without lldpd or the right to ask it."""
    tool = shutil.which(TOOL)
    if tool is None:
        return ()
    try:
        done = subprocess.run([tool, "-f", "json0"], capture_output=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse(done.stdout.decode(errors="replace"))


def parse(text: str) -> tuple[str, ...]:
    """Parse the output of "lldpctl -f json0"; a chassis without a name is listed by its id."""
    try:
        report: Any = parse_json(text)
        interfaces = [item for part in report["lldp"] for item in part.get("interface", ())]
        chassis = [item for interface in interfaces for item in interface["chassis"]]
        names = {str((item.get("name") or item["id"])[0]["value"]) for item in chassis}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # no neighbors, or another format
        return ()
    return tuple(sorted(names))
