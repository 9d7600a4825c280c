"""Check whether the image can be pulled, as far as its registry responds to anonymous requests."""

from __future__ import annotations

import re
from urllib.parse import urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from decorators.backends.findings import Findings
from estimator.hardware.cluster.api import Clock
from estimator.untrusted import parse_json

HUB = "registry-1.docker.io"
TYPES = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
# registries that Docker also contacts without TLS
_MAX_ANSWER_BYTES = 2**20  # of a token server, whose tokens have a few KB
_LOCAL_REGISTRY = re.compile(r"(localhost|127\.0\.0\.1)(:|$)")
_PLAIN = re.compile(r"^(docker\.io/)?(library/)?python(:|$)")


def check(image: str | None, findings: Findings, clock: Clock, *, gpus: bool) -> None:
    """Add a finding on the image: no if its registry lacks it, unknown if that cannot be determined."""
    if not image:
        findings.unknown("image", "none is named: Metaflow uses its default")
        return
    if gpus and _PLAIN.match(image):
        findings.unknown(
            "image",
            f"{image} has no PyTorch, which a GPU step needs",
            "Build one with infra/docker and name it: --with kubernetes:image=NAME",
        )
        return
    status = manifest_status(image, clock)
    if status == 200:
        findings.ok("image", image)
    elif status == 404:
        findings.no("image", f"the registry has no {image}", f"docker manifest inspect {image}")
    else:
        reason = "the registry requires a login" if status in (401, 403) else "the registry does not respond"
        findings.unknown("image", f"{image}: {reason}", f"docker manifest inspect {image}")


def manifest_status(image: str, clock: Clock) -> int | None:
    """Return the registry's HTTP status for the image's manifest; None if it does not respond.

    Registries that require a login return 401 for missing images, too.
    """
    registry, name, reference = parts(image)
    scheme = "http" if _LOCAL_REGISTRY.match(registry) else "https"
    url = f"{scheme}://{registry}/v2/{name}/manifests/{reference}"
    with urllib3.PoolManager(retries=False) as pool:
        try:
            response = pool.request("HEAD", url, headers={"Accept": TYPES}, timeout=clock.left() or 0.01)
            challenge = response.headers.get("WWW-Authenticate", "")
            if response.status != 401 or not challenge.startswith("Bearer"):
                return response.status
            token = _anonymous(pool, challenge, clock, is_local=scheme == "http")
            if token is None:
                return 401
            headers = {"Accept": TYPES, "Authorization": f"Bearer {token}"}
            response = pool.request("HEAD", url, headers=headers, timeout=clock.left() or 0.01)
        except HTTPError:
            return None
        # With an anonymous token, 404 may mean that access is denied
        return 401 if response.status == 404 and registry != HUB else response.status


def parts(image: str) -> tuple[str, str, str]:
    """Split an image name into (registry, name, tag or digest), like Docker."""
    first, slash, rest = image.partition("/")
    registry, name = (first, rest) if slash and re.search(r"[.:]|^localhost$", first) else (HUB, image)
    if registry == "docker.io":
        registry = HUB
    name, at, digest = name.partition("@")
    name, _, tag = name.partition(":")
    if registry == HUB and "/" not in name:
        name = f"library/{name}"
    return registry, name, digest if at else tag or "latest"


def _anonymous(pool: urllib3.PoolManager, challenge: str, clock: Clock, *, is_local: bool) -> str | None:
    """Return an anonymous token of the registry; None if it issues none.

    The registry names the token server (realm), which must use https; a registry on this machine (``here``)
    may name one on this machine.
    """
    parameters = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    try:
        realm = urlsplit(parameters.get("realm", ""))
    except ValueError:
        return None
    if realm.scheme != "https" and not (
        realm.scheme == "http" and is_local and _LOCAL_REGISTRY.match(realm.hostname or "")
    ):
        return None
    query = urlencode({key: parameters[key] for key in ("service", "scope") if key in parameters})
    response = pool.request(
        "GET", f"{parameters['realm']}?{query}", timeout=clock.left() or 0.01, preload_content=False
    )
    try:
        content = parse_json(response.read(_MAX_ANSWER_BYTES)) if response.status == 200 else None
    except ValueError:
        return None
    finally:
        response.close()
    token = (content.get("token") or content.get("access_token")) if isinstance(content, dict) else None
    return token if isinstance(token, str) and token.isascii() and token.isprintable() else None
