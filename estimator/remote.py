"""Access to the Hugging Face Hub and S3: errors for users, tokens, files on S3.

Tokens come from the environment alone and are never shown.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError

if TYPE_CHECKING:
    from estimator.aws_errors import AwsFailure

_log = logging.getLogger(__name__)
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_HUB_PAGE = re.compile(
    r"https?://(?:www\.)?huggingface\.co/(?:datasets/)?([\w.-]+/[\w.-]+)(?:/(?:viewer|tree)(?:/.*)?)?/?"
)


def hub() -> Any:
    """Import huggingface_hub; raises UserError if it is not installed, as planning does not need it."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "The Hugging Face Hub needs huggingface_hub, which is not installed.",
            "pip install 'metaflow-finetune[train]'",
        ) from None
    return huggingface_hub


def hub_id_of_page(address: str) -> str | None:
    """Return the id (org/name) of the repository whose page on the Hub has this address, if it is one."""
    match = _HUB_PAGE.fullmatch(address)
    return match[1] if match else None


def log_requests(client: Any) -> Any:
    """Log each request of a boto3 client: service, operation and HTTP status. Returns the client."""
    service = client.meta.service_model.service_name

    def log(http_response: Any, model: Any, **_: Any) -> None:
        _log.debug("AWS %s %s: status %d", service, model.name, http_response.status_code)

    client.meta.events.register("after-call.*.*", log)
    return client


def hub_token() -> str | bool:
    """Return the environment's token, or False: with None, huggingface_hub would read a token file."""
    return next((os.environ[name] for name in _TOKEN_VARIABLES if os.environ.get(name)), False)


@contextmanager
def hub_errors(kind: str, name: str) -> Iterator[None]:
    """Turn the failures of huggingface_hub, datasets and their HTTP client into UserErrors.

    ``kind`` is "model" or "dataset"; ``name`` its id on the hub.
    """
    import httpx2
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError:
        raise UserError(f"{name!r} is not a Hugging Face id.", "An id looks like org/name.") from None
    except (
        HfHubHTTPError,
        EntryNotFoundError,
        httpx2.HTTPError,
        ConnectionError,
        FileNotFoundError,
    ) as error:
        raise _explain_hub(error, kind, name) from None


def _explain_hub(error: Exception, kind: str, name: str) -> UserError:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
    )

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    title = f"{kind.capitalize()} {name}"
    if isinstance(error, GatedRepoError) or "gated dataset" in str(error):
        if hub_token():
            return UserError(
                f"HF_TOKEN: this token may not read {kind} {name}, which is gated.",
                f"Ask for access with the token's account at {page}",
            )
        return UserError(
            f"HF_TOKEN: {kind} {name} is gated and no token is set.",
            f"Ask for access at {page} and set HF_TOKEN (on a cluster with @secrets).",
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return UserError(f"{title}: the Hugging Face Hub has no config.json for it.", f"See {page}")
    if status in (401, 403) and hub_token():
        return UserError(
            f"HF_TOKEN: the Hugging Face Hub refuses this token for {kind} {name} (HTTP {status}).",
            "Make a token with read access at https://huggingface.co/settings/tokens",
        )
    # The hub answers 401 to a caller without a token where there is no such repository, too.
    if status in (401, 403, 404) or "doesn't exist on the Hub" in str(error):
        return UserError(
            f"{title} is not on the Hugging Face Hub, or is private.",
            f"Look at {page}; for a private one set HF_TOKEN.",
        )
    if status is not None:
        return UserError(f"{title}: the Hugging Face Hub answers HTTP {status}.", "Try again later.")
    offline = isinstance(error, OfflineModeIsEnabled) or bool(os.environ.get("HF_HUB_OFFLINE"))
    if offline or isinstance(error, LocalEntryNotFoundError):
        reason = "HF_HUB_OFFLINE is set" if offline else "the Hugging Face Hub cannot be reached"
        return UserError(
            f"{title} is not in the local cache, and {reason}.",
            f"Run `finetune fetch` where there is internet access, or give a local path for the {kind}.",
        )
    return UserError(
        f"{title}: the Hugging Face Hub cannot be reached ({type(error).__name__}).",
        f"Check the network (HF_ENDPOINT, proxies), or give a local path instead of the {kind}'s id.",
    )


def s3_location(url: str) -> tuple[str, str]:
    """Split s3://bucket/key into (bucket, key); raises UserError if one of them is missing."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket or not key.strip("/"):
        raise UserError(f"{url} names no file or folder.", "Write s3://bucket/path")
    return bucket, key


def s3_client() -> Any:
    return log_requests(_boto3().client("s3"))


def _boto3() -> Any:
    try:
        import boto3
    except ImportError:
        raise UserError(
            "s3:// needs boto3, which is not installed.", "pip install 'metaflow-finetune[aws]'"
        ) from None
    return boto3


@contextmanager
def s3_errors(url: str) -> Iterator[None]:
    """Turn the failures of boto3 into UserErrors."""
    _boto3()
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError

    from estimator.aws_errors import failure_of  # planning imports this module and rarely meets S3

    try:
        yield
    except S3UploadFailedError as error:
        raise UserError(
            f"{url}: {' '.join(str(error).split())}", "Check the account: aws sts get-caller-identity"
        ) from None
    except (BotoCoreError, ClientError) as error:
        raise _explain_s3(failure_of(error), url) from None


def _explain_s3(failure: AwsFailure, url: str) -> UserError:
    if credentials := failure.credentials_error(url):
        return credentials
    if failure.is_missing:
        return UserError(f"{url}: there is no such key.", "List the keys: aws s3 ls")
    if failure.code == "NoSuchBucket":
        return UserError(f"{url}: there is no such bucket.", "List the buckets: aws s3 ls")
    if failure.kind == "denied":
        return UserError(
            f"{url}: the AWS credentials may not read it ({failure.code}).",
            "Check the account: aws sts get-caller-identity",
        )
    if failure.kind in ("busy", "refused"):
        return UserError(f"{url}: S3 answers {failure.code}.", "Try again later.")
    return UserError(f"{url}: S3 cannot be reached ({failure.code}).", "Check the network and AWS_REGION.")


def s3_download(client: Any, bucket: str, key: str, target: Path) -> None:
    """Download one object under a temporary name, then rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".part")
    try:
        client.download_file(bucket, key, str(temporary))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
