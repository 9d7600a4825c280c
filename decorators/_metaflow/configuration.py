"""Metaflow's configuration outside of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Values of Metaflow's configuration; None if not set."""

    datastore: str  # "local", "s3", "gs", "azure"
    root: str | None  # root of the datastore; of a local one that does not exist yet, its future path
    metadata: str  # "local", "service"
    service_url: str | None  # of the metadata service
    step_functions_role: str | None
    s3_endpoint: str | None
    kubernetes_service_account: str | None
    kubernetes_secrets: tuple[str, ...]  # names of Secrets that become environment variables of pods


def configuration() -> Configuration:
    """Read the configuration from Metaflow's profile and the environment. Creates no folder."""
    from metaflow.metaflow_config import (
        DEFAULT_DATASTORE,
        DEFAULT_METADATA,
        KUBERNETES_SECRETS,
        KUBERNETES_SERVICE_ACCOUNT,
        S3_ENDPOINT_URL,
        SERVICE_URL,
        SFN_IAM_ROLE,
    )
    from metaflow.plugins import DATASTORES

    kind = next(kind for kind in DATASTORES if kind.TYPE == DEFAULT_DATASTORE)
    root = kind.get_datastore_root_from_config(lambda *_, **__: None, create_on_absent=False)
    if root is None and DEFAULT_DATASTORE == "local":
        root = str(Path.cwd() / kind.DATASTORE_DIR)
    return Configuration(
        datastore=str(DEFAULT_DATASTORE),
        root=root,
        metadata=str(DEFAULT_METADATA),
        service_url=SERVICE_URL,
        step_functions_role=SFN_IAM_ROLE,
        s3_endpoint=S3_ENDPOINT_URL,
        kubernetes_service_account=KUBERNETES_SERVICE_ACCOUNT,
        kubernetes_secrets=tuple(filter(None, (KUBERNETES_SECRETS or "").split(","))),
    )
