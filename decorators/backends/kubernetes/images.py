"""Can the image be pulled? As far as its registry tells without a login."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from decorators.backends.findings import Findings
from estimator.hardware.cluster.api import Clock

HUB = "registry-1.docker.io"
TYPES = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_HERE = re.compile(r"(localhost|127\.0\.0\.1)(:|$)")  # registries that Docker, too, asks without TLS
_PLAIN = re.compile(r"^(docker\.io/)?(library/)?python(:|$)")


def check(image: str | None, findings: Findings, clock: Clock, *, gpus: bool) -> None:
    """Add a row on the image: refused where its registry has none, unknown where that cannot be told."""
    if not image:
        findings.unknown("image", "none is named: Metaflow takes its default")
        return
    if gpus and _PLAIN.match(image):
        findings.unknown(
            "image",
            f"{image} has no PyTorch, which a GPU step needs",
            "Build one with infra/docker, and name it: --with kubernetes:image=NAME",
        )
        return
    status = manifest_status(image, clock)
    if status == 200:
        findings.ok("image", image)
    elif status == 404:
        findings.no("image", f"its registry has no {image}", f"docker manifest inspect {image}")
    else:
        why = "its registry wants a login" if status in (401, 403) else "its registry doesn't answer here"
        findings.unknown("image", f"{image}: {why}", f"docker manifest inspect {image}")


def manifest_status(image: str, clock: Clock) -> int | None:
    """The HTTP status with which the registry answers for the image's manifest; None: no answer.

    404 is told only by registries that answer to anybody; others say 401 of what isn't there, too.
    """
    registry, name, reference = parts(image)
    scheme = "http" if _HERE.match(registry) else "https"
    url = f"{scheme}://{registry}/v2/{name}/manifests/{reference}"
    with urllib3.PoolManager(retries=False) as pool:
        try:
            answer = pool.request("HEAD", url, headers={"Accept": TYPES}, timeout=clock.left() or 0.01)
            challenge = answer.headers.get("WWW-Authenticate", "")
            if answer.status != 401 or not challenge.startswith("Bearer"):
                return answer.status
            token = _anonymous(pool, challenge, clock, here=scheme == "http")
            if token is None:
                return 401
            headers = {"Accept": TYPES, "Authorization": f"Bearer {token}"}
            answer = pool.request("HEAD", url, headers=headers, timeout=clock.left() or 0.01)
        except HTTPError:
            return None
        # With a stranger's token "not found" may mean "not for you"
        return 401 if answer.status == 404 and registry != HUB else answer.status


def parts(image: str) -> tuple[str, str, str]:
    """(registry, name, tag or digest) of an image's name, as Docker reads it."""
    first, slash, rest = image.partition("/")
    registry, name = (first, rest) if slash and re.search(r"[.:]|^localhost$", first) else (HUB, image)
    if registry == "docker.io":
        registry = HUB
    name, at, digest = name.partition("@")
    name, _, tag = name.partition(":")
    if registry == HUB and "/" not in name:
        name = f"library/{name}"
    return registry, name, digest if at else tag or "latest"


def _anonymous(pool: urllib3.PoolManager, challenge: str, clock: Clock, *, here: bool) -> str | None:
    """A token that the registry gives to anybody; None where it doesn't.

    The registry names the place that gives it, the realm. It is asked by https alone; a registry on this
    machine (``here``) may name one on this machine.
    """
    parameters = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    try:
        realm = urlsplit(parameters.get("realm", ""))
    except ValueError:
        return None
    if realm.scheme != "https" and not (
        realm.scheme == "http" and here and _HERE.match(realm.hostname or "")
    ):
        return None
    query = urlencode({key: parameters[key] for key in ("service", "scope") if key in parameters})
    answer = pool.request("GET", f"{parameters['realm']}?{query}", timeout=clock.left() or 0.01)
    if answer.status != 200:
        return None
    try:
        content = json.loads(answer.data)
    except ValueError:
        return None
    token = content.get("token") or content.get("access_token")
    return str(token) if token else None
