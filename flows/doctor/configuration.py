"""Metaflow's configuration: profile, datastore (including a write test), and metadata."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

from flows.doctor.line import Line
from flows.doctor.local import not_writable

CONFIGURE = "metaflow configure"
DATASTORES = "Run metaflow configure aws (or gcp, azure); metaflow configure show prints the settings"
_KEY, _CONTENT = "probe", b"finetune doctor"
_TIMEOUT_S = 5.0


def profile() -> list[Line]:
    """Check the configuration file that Metaflow reads (METAFLOW_HOME, METAFLOW_PROFILE)."""
    name = os.environ.get("METAFLOW_PROFILE")
    home = os.environ.get("METAFLOW_HOME", "~/.metaflowconfig")
    file = Path(home, f"config_{name}.json" if name else "config.json").expanduser()
    if not file.exists():
        if name:
            found = f"METAFLOW_PROFILE={name}: there is no {file}"
            fix = f"Run metaflow configure --profile {name} ..., or unset METAFLOW_PROFILE"
            return [Line(check="profile", state="no", found=found, fix=fix)]
        return [Line(check="profile", state="ok", found=f"Metaflow's defaults: there is no {file}")]
    try:
        import metaflow  # noqa: F401 - reads the file
    except Exception as error:  # noqa: BLE001 - a damaged file raises errors of several types
        message = f"{type(error).__name__}: {error}"
        return [
            Line(
                check="profile", state="no", found=f"{file}: {message}", fix=f"Run {CONFIGURE} to recreate it"
            )
        ]
    return [Line(check="profile", state="ok", found=str(file))]


def datastore() -> list[Line]:
    """Check that the configured datastore can be read and written, with a small file."""
    # Limits of this process; Metaflow reads them when it is imported
    os.environ.setdefault("METAFLOW_S3_CLIENT_RETRY_CONFIG", '{"total_max_attempts": 1}')
    os.environ.setdefault("FINETUNE_DATASTORE_TIMEOUT", "0.2")  # minutes
    from decorators._metaflow import configuration

    configured = configuration()
    kind, root = configured.datastore, configured.root
    if root is None:
        fix = f"Set METAFLOW_DATASTORE_SYSROOT_{kind.upper()}, or run {CONFIGURE}"
        return [Line(check="datastore", state="no", found=f"{kind} without a root", fix=fix)]
    if kind == "local":
        return [_local(Path(root))]
    from decorators import MetaflowStorage
    from decorators._metaflow import configured_storage

    storage = MetaflowStorage(configured_storage(), "finetune-doctor")
    if kind != "s3":  # Metaflow cannot delete files in other datastores
        storage.size(_KEY)
        return [Line(check="datastore", state="ok", found=f"{root} responds; writing was not tested")]
    try:
        storage.put_bytes(_KEY, _CONTENT)
        read_back = storage.get_bytes(_KEY)
        storage.delete([_KEY])
    except Exception as error:  # noqa: BLE001 - each datastore has its own error types
        message = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        advice = getattr(error, "advice", "") or "Check its address, the login and the bucket policy"
        return [Line(check="datastore", state="no", found=f"{root}: {message}", fix=advice)]
    if read_back != _CONTENT:
        return [
            Line(check="datastore", state="no", found=f"{root} returned a different file than was written")
        ]
    return [Line(check="datastore", state="ok", found=f"{root} can be read and written")]


def _local(root: Path) -> Line:
    why_not = not_writable(root)
    if why_not:
        fix = "Work in another folder, or set METAFLOW_DATASTORE_SYSROOT_LOCAL to a writable one"
        return Line(check="datastore", state="no", found=f"local, {root}: {why_not}", fix=fix)
    try:
        if root.exists():
            next(root.iterdir(), None)
    except OSError as error:
        fix = "Give this user read permission"
        return Line(check="datastore", state="no", found=f"local, {root}: {error.strerror}", fix=fix)
    return Line(check="datastore", state="ok", found=f"local, {root}: can be read and written")


def metadata() -> list[Line]:
    """Check the metadata provider: local, or a service that responds."""
    from decorators._metaflow import configuration

    configured = configuration()
    if configured.metadata != "service":
        return [Line(check="metadata", state="ok", found=configured.metadata)]
    url = configured.service_url
    if not url:
        found, fix = "service, but METAFLOW_SERVICE_URL is not set", f"Run {CONFIGURE}"
        return [Line(check="metadata", state="no", found=found, fix=fix)]
    fix = "Check METAFLOW_SERVICE_URL, network and VPN, or set METAFLOW_DEFAULT_METADATA=local"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/ping", timeout=_TIMEOUT_S) as response:  # noqa: S310
            response.read(1)
    except HTTPError as error:
        found = f"service {url} responds with status {error.code}"
        return [Line(check="metadata", state="no", found=found, fix=fix)]
    except (URLError, OSError, ValueError) as error:
        message = getattr(error, "reason", error)
        return [Line(check="metadata", state="no", found=f"service {url}: {message}", fix=fix)]
    return [Line(check="metadata", state="ok", found=f"service {url} responds")]
