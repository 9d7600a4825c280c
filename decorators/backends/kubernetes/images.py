"""Check whether the image can be pulled, as far as its registry responds to anonymous requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError

from decorators.backends.findings import Findings
from estimator.hardware.cluster.api import Clock
from estimator.untrusted import parse_json

MAX_MANIFEST_BYTES = 4 * 2**20  # the limit that registries set for manifests
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)  # errors from an invalid manifest
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
_MAX_ANSWER_BYTES = 2**20  # limit of a token server's response; tokens have a few KB
_LOCAL_REGISTRY = re.compile(r"(localhost|127\.0\.0\.1)(:|$)")
_PLAIN = re.compile(r"^(docker\.io/)?(library/)?python(:|$)")


def check(image: str | None, findings: Findings, clock: Clock, *, gpus: bool) -> frozenset[str] | None:
    """Add a finding on the image: no if its registry lacks it, unknown if that cannot be determined.

    Returns the CPU architectures that it is built for; None if they are unknown.
    """
    if not image:
        findings.unknown("image", "none is named: Metaflow uses its default")
        return None
    if gpus and _PLAIN.match(image):
        findings.unknown(
            "image",
            f"{image} has no PyTorch, which a GPU step needs",
            "Build one with infra/docker and name it: --with kubernetes:image=NAME",
        )
        return None
    status, built_for = look_up(image, clock)
    if status == 200:
        findings.ok("image", image)
    elif status == 404:
        findings.no("image", f"the registry has no {image}", f"docker manifest inspect {image}")
    else:
        reason = "the registry requires a login" if status in (401, 403) else "the registry does not respond"
        findings.unknown("image", f"{image}: {reason}", f"docker manifest inspect {image}")
    return built_for


def look_up(image: str, clock: Clock) -> tuple[int | None, frozenset[str] | None]:
    """Return (HTTP status of the image's manifest, CPU architectures it is built for); None: unknown.

    Registries that require a login return 401 for missing images, too.
    """
    registry, name, reference = parts(image)
    scheme = "http" if _LOCAL_REGISTRY.match(registry) else "https"
    root = f"{scheme}://{registry}/v2/{name}"
    headers = {"Accept": TYPES}
    with urllib3.PoolManager(retries=False) as pool:
        try:
            status, body, challenge = _get(pool, f"{root}/manifests/{reference}", headers, clock)
            if status == 401 and challenge.startswith("Bearer"):
                token = _anonymous(pool, challenge, clock, is_local=scheme == "http")
                if token is None:
                    return 401, None
                headers["Authorization"] = f"Bearer {token}"
                status, body, _ = _get(pool, f"{root}/manifests/{reference}", headers, clock)
                # With an anonymous token, 404 may mean that access is denied
                status = 401 if status == 404 and registry != HUB else status
        except HTTPError:
            return None, None
        if status != 200:
            return status, None
        try:
            return status, architectures_in(
                body, lambda digest: _get(pool, f"{root}/blobs/{digest}", headers, clock)[1]
            )
        except (HTTPError, *UNREADABLE):
            return status, None  # not a manifest as documented


def _get(
    pool: urllib3.PoolManager, url: str, headers: dict[str, str], clock: Clock
) -> tuple[int, bytes, str]:
    """Return (status, body up to a limit, authentication challenge); follows one redirect that uses TLS."""
    for _ in range(2):
        response = pool.request(
            "GET", url, headers=headers, timeout=clock.left() or 0.01, redirect=False, preload_content=False
        )
        try:
            location = response.headers.get("Location", "")
            if response.status in (301, 302, 303, 307, 308) and location.startswith("https://"):
                url, headers = location, {}  # storage of another host gets no token
                continue
            body = response.read(MAX_MANIFEST_BYTES, decode_content=True)
            return response.status, body, response.headers.get("WWW-Authenticate", "")
        finally:
            response.release_conn()
    return response.status, b"", ""


def architectures_in(manifest: bytes, blob: Callable[[str], bytes]) -> frozenset[str]:
    """Return the CPU architectures of an image index, or of the configuration of a single image.

    Raises one of ``UNREADABLE`` for another document.
    """
    content = parse_json(manifest)
    if "manifests" in content:
        platforms = (item.get("platform") or {} for item in content["manifests"])
        known = {str(platform.get("architecture")) for platform in platforms}
    else:
        known = {str(parse_json(blob(content["config"]["digest"]))["architecture"])}
    known -= {"unknown", "None"}  # attestations are no images
    if not known:
        raise ValueError("no architecture")
    return frozenset(known)


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

    The registry names the token server (realm), which must use https; a registry on this machine
    (``is_local``) may name one on this machine.
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
