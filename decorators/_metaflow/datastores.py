"""Access to the run's datastore for files of any size, with a limit on waiting for an unavailable one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from metaflow.system_context import system_context

from estimator.errors import UserError


def storage() -> Any:
    """Return the storage of this run's datastore: Metaflow's DataStoreStorage for local, S3, GS or Azure."""
    if system_context.flow_datastore is None:
        raise RuntimeError("no flow is running in this process")
    return system_context.flow_datastore._storage_impl


def local_datastore() -> Path | None:
    """Return the folder of this run's datastore; None if it is not on this machine, or no flow is running."""
    from metaflow.plugins.datastores.local_storage import LocalStorage

    datastore = system_context.flow_datastore
    if datastore is None or datastore.TYPE != LocalStorage.TYPE:
        return None
    return Path(datastore._storage_impl.datastore_root).absolute()


def configured_storage() -> Any:
    """Return the storage of the configured datastore, outside of a run."""
    from metaflow.metaflow_config import DEFAULT_DATASTORE
    from metaflow.plugins import DATASTORES

    kind = next(kind for kind in DATASTORES if kind.TYPE == DEFAULT_DATASTORE)
    return kind(kind.get_datastore_root_from_config(lambda *_, **__: None))


def check_local_datastore() -> None:
    """Raise UserError if Metaflow keeps data in a local folder that is not writable; Metaflow only fails."""
    from metaflow.metaflow_config import DEFAULT_DATASTORE, DEFAULT_METADATA
    from metaflow.plugins.datastores.local_storage import LocalStorage

    if LocalStorage.TYPE not in (DEFAULT_DATASTORE, DEFAULT_METADATA):
        return
    root = LocalStorage.get_datastore_root_from_config(lambda *_, **__: None, create_on_absent=False)
    folder = Path(root or LocalStorage.DATASTORE_DIR).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(
            f"{existing} is not writable: Metaflow keeps runs in {folder}.",
            "Start in another folder, or choose one: export METAFLOW_DATASTORE_SYSROOT_LOCAL=FOLDER",
        )


def s3_client(*, brief: bool = False) -> tuple[Any, type[Exception]]:
    """Return Metaflow's boto3 client for S3 and its error class; ``brief``: one attempt, short timeouts."""
    from botocore.config import Config
    from metaflow.metaflow_config import DATATOOLS_CLIENT_PARAMS
    from metaflow.plugins.datatools.s3.s3util import get_s3_client

    if not brief:
        client, error = get_s3_client()
        return client, error
    user_config = DATATOOLS_CLIENT_PARAMS.get("config") or Config()
    user_config = user_config if isinstance(user_config, Config) else Config(**user_config)
    brief = user_config.merge(Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}))
    client, error = get_s3_client(s3_client_params={**DATATOOLS_CLIENT_PARAMS, "config": brief})
    return client, error


DATASTORE_TIMEOUT = "FINETUNE_DATASTORE_TIMEOUT"  # minutes
S3_LIMITS = (
    "METAFLOW_S3_RETRY_COUNT",
    "METAFLOW_S3_TRANSIENT_RETRY_COUNT",
    "METAFLOW_S3_CLIENT_RETRY_CONFIG",
)
_S3_ATTEMPTS = {"total_max_attempts": 3, "mode": "adaptive"}  # boto3's, of each of Metaflow's
_S3_SOCKETS = {"connect_timeout": 20, "read_timeout": 30}  # seconds
_limited = False
_given_up = False


def datastore_timeout_s() -> float:
    """Return the seconds that a datastore may be unavailable during a run. Raises UserError if the variable
    FINETUNE_DATASTORE_TIMEOUT is not a positive number of minutes.
    """
    text = os.environ.get(DATASTORE_TIMEOUT) or "5"
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise UserError(
            f"{DATASTORE_TIMEOUT}={text} must be a number of minutes above 0.", "Unset it for 5 minutes."
        )
    return minutes * 60


def limit_datastore() -> None:
    """Make Metaflow give up an S3 operation after about half of :func:`datastore_timeout_s`.

    By default Metaflow 2.19.39 makes 21 attempts and waits up to 6 minutes before each. Values set by the
    user are kept. Applies to this process and its children; ``S3_LIMITS`` names the variables.
    """
    global _limited
    from metaflow import metaflow_config
    from metaflow.metaflow_config_funcs import config_values
    from metaflow.plugins.datatools.s3 import s3, s3util

    if _limited:
        return
    # Metaflow sleeps 1, 2, 4... seconds, after the last attempt too
    retries = max(1, int(math.log2(datastore_timeout_s() / 2 + 1)) - 1)
    log_retries = min(2, retries)  # reads of the step's log are repeated anyway
    _limited = True
    configured = dict(config_values())
    for name, value in zip(S3_LIMITS, (log_retries, retries, _S3_ATTEMPTS), strict=True):
        os.environ.setdefault(name, configured.get(name) or json.dumps(value))
    if S3_LIMITS[0] not in configured:
        s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = log_retries
    if S3_LIMITS[1] not in configured:
        s3.S3_TRANSIENT_RETRY_COUNT = retries
    if S3_LIMITS[2] not in configured:
        metaflow_config.S3_CLIENT_RETRY_CONFIG = dict(_S3_ATTEMPTS)
    if "METAFLOW_DATATOOLS_CLIENT_PARAMS" not in configured:
        metaflow_config.DATATOOLS_CLIENT_PARAMS.setdefault("config", dict(_S3_SOCKETS))


def give_up_datastore() -> None:
    """Disable Metaflow's S3 retries in this process and its children."""
    global _given_up
    from metaflow.plugins.datatools.s3 import s3, s3util

    _given_up = True
    s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = s3.S3_TRANSIENT_RETRY_COUNT = 0
    os.environ |= dict.fromkeys(S3_LIMITS[:2], "0")


def datastore_given_up() -> bool:
    """Whether the datastore was unavailable for too long and is not retried any more."""
    return _given_up


def datastore_variables() -> dict[str, str]:
    """Return the variables that set these limits in a container. Raises UserError."""
    limit_datastore()
    return {name: os.environ[name] for name in (DATASTORE_TIMEOUT, *S3_LIMITS) if name in os.environ}
