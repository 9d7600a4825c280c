"""Parts of a GPU that Kubernetes allocates on their own: MIG slices, and replicas of a shared GPU.

A part is a GPU by name, e.g. ``H100 SXM MIG 3g.40gb`` or ``L4 shared by 4``, so that every process of a run
derives the same values from the name alone.
"""

from __future__ import annotations

import re

# "1g.10gb+me" of a product label is the profile "1g.10gb.me" of a resource
PROFILE = re.compile(r"(?P<slices>[1-9]\d*)g\.(?P<gb>[1-9]\d*)gb(?P<suffix>([.+][a-z]+)*)")
_MIG = re.compile(rf"(?P<gpu>.+) MIG (?P<profile>{PROFILE.pattern})")
_REPLICA = re.compile(r"(?P<gpu>.+) shared by (?P<replicas>\d+)")
# An H100 or A100 has 8 parts of memory and 7 of its compute units; 1g has about an eighth of these
ALL_SLICES = 8


def slice_name(gpu: str, profile: str) -> str:
    """Return the name of a MIG slice."""
    return f"{gpu} MIG {profile.replace('+', '.')}"


def replica_name(gpu: str, replicas: int) -> str:
    """Return the name of one replica of a shared GPU."""
    return f"{gpu} shared by {replicas}"


def profile_of(name: str | None) -> str | None:
    """Return the MIG profile of a GPU name; None if it is no slice."""
    match = _MIG.fullmatch(name or "")
    return match["profile"] if match else None


def is_part(name: str | None) -> bool:
    """Return whether a GPU name is that of a slice or a replica, of which a job can use one only."""
    return bool(_MIG.fullmatch(name or "") or _REPLICA.fullmatch(name or ""))


def parse(name: str) -> dict[str, str]:
    """Split a part's name: ``gpu``, with ``profile``, ``slices``, ``gb`` or with ``replicas``; else empty."""
    match = _MIG.fullmatch(name.strip()) or _REPLICA.fullmatch(name.strip())
    return match.groupdict() if match else {}
