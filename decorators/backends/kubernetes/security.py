"""The pod security standard "restricted": what it demands of a container, and whether a step's pods have it.

Metaflow hands ``security_context=`` of ``@kubernetes`` on to the container as it is, by the names of the
kubernetes library.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

ENFORCE = "pod-security.kubernetes.io/enforce"  # label of a namespace
RESTRICTED: dict[str, Any] = {  # Kubernetes, "pod security standards"
    "run_as_non_root": True,
    "run_as_user": 1000,  # of the images of infra/docker
    "allow_privilege_escalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccomp_profile": {"type": "RuntimeDefault"},
}


def option() -> str:
    """The option of a flow by which its pods meet the standard, as a shell takes it."""
    context = json.dumps(RESTRICTED, separators=(",", ":"))
    return f"--with {shlex.quote(f'kubernetes:security_context={context}')}"


def is_restricted(context: object) -> bool:
    """Whether a container with this security context meets the standard."""
    if not isinstance(context, Mapping):
        return False
    seccomp, capabilities = context.get("seccomp_profile") or {}, context.get("capabilities") or {}
    return (
        context.get("run_as_non_root") is True
        and context.get("run_as_user") != 0
        and context.get("allow_privilege_escalation") is False
        and "ALL" in (capabilities.get("drop") or ())
        and not set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}
        and seccomp.get("type") in ("RuntimeDefault", "Localhost")
    )
