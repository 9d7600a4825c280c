"""The pod security standard "restricted": its requirements, and whether a step's pods meet them.

Metaflow passes ``security_context=`` of ``@kubernetes`` to the container unchanged, with the names of the
Kubernetes Python client.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

ENFORCE = "pod-security.kubernetes.io/enforce"  # label of a namespace
RESTRICTED: dict[str, Any] = {  # Kubernetes, "pod security standards"
    "run_as_non_root": True,
    "run_as_user": 1000,  # user of the images in infra/docker
    "allow_privilege_escalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccomp_profile": {"type": "RuntimeDefault"},
}


def security_context_option() -> str:
    """Return the option of a flow with which its pods meet the standard, quoted for a shell."""
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
