"""The run's datastore, for files of any size and no longer than a limit."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from metaflow.system_context import system_context

from estimator.errors import UserError


def storage() -> Any:
    """The storage behind this run's datastore: Metaflow's DataStoreStorage of local, S3, GS or Azure."""
    if system_context.flow_datastore is None:
        raise RuntimeError("no flow is running in this process")
    return system_context.flow_datastore._storage_impl


def configured_storage() -> Any:
    """The storage of the datastore that Metaflow is configured with, outside of any run."""
    from metaflow.metaflow_config import DEFAULT_DATASTORE
    from metaflow.plugins import DATASTORES

    kind = next(kind for kind in DATASTORES if kind.TYPE == DEFAULT_DATASTORE)
    return kind(kind.get_datastore_root_from_config(lambda *_, **__: None))


def s3_client(*, impatient: bool = False) -> tuple[Any, type[Exception]]:
    """Metaflow's boto3 client for S3 and the class of its errors; ``impatient``: it asks once, briefly."""
    from botocore.config import Config
    from metaflow.metaflow_config import DATATOOLS_CLIENT_PARAMS
    from metaflow.plugins.datatools.s3.s3util import get_s3_client

    if not impatient:
        client, error = get_s3_client()
        return client, error
    own = DATATOOLS_CLIENT_PARAMS.get("config") or Config()
    own = own if isinstance(own, Config) else Config(**own)
    brief = own.merge(Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1}))
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


def datastore_away_s() -> float:
    """Return how long a datastore may be unavailable during a run. Raises UserError unless it is a number
    of minutes.
    """
    text = os.environ.get(DATASTORE_TIMEOUT) or "5"
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise UserError(
            f"{DATASTORE_TIMEOUT}={text}: it is a number of minutes, and above 0.",
            "Unset it for 5 minutes.",
        )
    return minutes * 60


def limit_datastore() -> None:
    """Have Metaflow give an operation on S3 up after about half of :func:`datastore_away_s`.

    Left alone, Metaflow 2.19.39 makes 21 attempts, and waits up to 6 minutes before each. What the user has
    set stands. Holds for this process and those that it starts; ``S3_LIMITS`` are the variables.
    """
    global _limited
    from metaflow import metaflow_config
    from metaflow.metaflow_config_funcs import config_values
    from metaflow.plugins.datatools.s3 import s3, s3util

    if _limited:
        return
    # Metaflow sleeps 1, 2, 4... seconds, after the last attempt too
    retries = max(1, int(math.log2(datastore_away_s() / 2 + 1)) - 1)
    log_retries = min(2, retries)  # of the step's log, which is asked for again anyway
    _limited = True
    own = dict(config_values())
    for name, value in zip(S3_LIMITS, (log_retries, retries, _S3_ATTEMPTS), strict=True):
        os.environ.setdefault(name, own.get(name) or json.dumps(value))
    if S3_LIMITS[0] not in own:
        s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = log_retries
    if S3_LIMITS[1] not in own:
        s3.S3_TRANSIENT_RETRY_COUNT = retries
    if S3_LIMITS[2] not in own:
        metaflow_config.S3_CLIENT_RETRY_CONFIG = dict(_S3_ATTEMPTS)
    if "METAFLOW_DATATOOLS_CLIENT_PARAMS" not in own:
        metaflow_config.DATATOOLS_CLIENT_PARAMS.setdefault("config", dict(_S3_SOCKETS))


def give_datastore_up() -> None:
    """From now on Metaflow asks S3 once, in this process and in those that it starts."""
    global _given_up
    from metaflow.plugins.datatools.s3 import s3, s3util

    _given_up = True
    s3.S3_RETRY_COUNT = s3util.S3_RETRY_COUNT = s3.S3_TRANSIENT_RETRY_COUNT = 0
    os.environ |= dict.fromkeys(S3_LIMITS[:2], "0")


def datastore_given_up() -> bool:
    """Whether the datastore has stayed away for too long, and no one asks it any more."""
    return _given_up


def datastore_variables() -> dict[str, str]:
    """The limits on the datastore, for a container. Raises UserError, as :func:`datastore_away_s`."""
    limit_datastore()
    return {name: os.environ[name] for name in (DATASTORE_TIMEOUT, *S3_LIMITS) if name in os.environ}
