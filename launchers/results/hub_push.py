"""Upload of the finished model to the Hugging Face Hub, with a check before the run.

All files are uploaded in one commit. Files that the Hub already has are not sent again, so a retry continues
a failed upload, and a repeated upload changes nothing. The token is read from the environment and passed only
to the client.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.remote import hub_token
from estimator.terminal import print
from estimator.untrusted import list_contained_files
from launchers import engines
from launchers.results.handover import PAGE
from launchers.settings import Settings

PROGRESS_INTERVAL_S = 10.0
PAUSES_S = (10.0, 60.0)  # pause before each retry if the Hub does not respond
_MESSAGE = "Model, tokenizer and page of a finished run"
_TOKENS = "https://huggingface.co/settings/tokens"
_WRITE = "repo.write"  # required permission of a fine-grained token


def check(settings: Settings, *, must_reach: bool) -> None:
    """Raise UserError if the upload requested by ``export.push`` would fail; called before training.

    ``must_reach``: whether the Hub must be reachable from this machine. It need not be where the run is
    launched, because the run's first step checks again.
    """
    repo = settings.export.push
    if repo is None:
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError("export.push: huggingface_hub is not installed.", "pip install -e '.[train]'")
    if not hub_token():
        raise UserError(
            f"--push {repo}: no token is set in the environment.",
            f"Set HF_TOKEN to a token with write access from {_TOKENS} (on a cluster with @secrets).",
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        if must_reach:
            raise UserError(
                f"--push {repo}: HF_HUB_OFFLINE is set on this machine.",
                "Unset it, or remove export.push: the model's folder can be uploaded later.",
            )
        return
    try:
        with _translated_errors(repo):
            account = _api().whoami()
    except UnreachedError:
        if must_reach:
            raise
        return
    _check_rights(account, repo)


class UnreachedError(UserError):
    """The Hub cannot be reached, or is overloaded; a retry may succeed."""


def _check_rights(account: dict[str, Any], repo: str) -> None:
    """Raise UserError if the token, or its account, lacks write access to the repository."""
    owner, name = repo.split("/")
    organizations = {organization.get("name"): organization for organization in account.get("orgs", [])}
    if owner != account.get("name") and owner not in organizations:
        raise UserError(
            f"export.push: the token belongs to {account.get('name')}, who is not a member of {owner}.",
            f"Use --push {account.get('name')}/{name}, or another token.",
        )
    token = account.get("auth", {}).get("accessToken", {})
    scoped = token.get("fineGrained", {}).get("scoped") if token.get("role") == "fineGrained" else None
    grants = [
        organization.get("permissions", [])
        for organization in scoped or ()
        if organization.get("entity", {}).get("name") in (owner, repo)
    ]
    refused = scoped is not None and not any(_WRITE in grant for grant in grants)
    if token.get("role") == "read" or refused:
        raise UserError(
            f"HF_TOKEN: this token may not write to {owner}.",
            f"Create one with write access at {_TOKENS}",
        )
    if organizations.get(owner, {}).get("roleInOrg") == "read":
        raise UserError(
            f"export.push: {account.get('name')} has only read access to {owner}.",
            f"Ask its administrators for write access, or push to {account.get('name')}.",
        )


def push(folder: Path, page: str, settings: Settings) -> str:
    """Upload the result in ``folder`` (``launchers.engines.result_of``); return the repository's URL.

    An adapter next to a merged model is uploaded to ``adapter/``. ``page``: content of the repository's
    README.md. Raises UserError, after some retries if the Hub does not respond; another call continues the
    upload.
    """
    from huggingface_hub import CommitOperationAdd

    repo = str(settings.export.push)
    result = engines.result_of(folder)
    files = {
        path.relative_to(result).as_posix(): path
        for path in list_contained_files(result)
        if path.name != PAGE
    }
    adapter = folder / "adapter"
    if result.name != "adapter" and adapter.is_dir():
        files |= {path.relative_to(folder).as_posix(): path for path in list_contained_files(adapter)}
    size = sum(path.stat().st_size for path in files.values())
    additions = [CommitOperationAdd(path_in_repo=PAGE, path_or_fileobj=page.encode())]
    additions += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    private = settings.export.visibility == "private"
    with _progress(f"push: {format_bytes(size)} in {len(additions)} files to {repo}"):
        for pause_s in PAUSES_S:
            with contextlib.suppress(UnreachedError):
                return _commit(repo, additions, private=private)
            print(f"{repo}: the Hugging Face Hub does not respond; retrying in {pause_s:g} s", flush=True)
            time.sleep(pause_s)
        return _commit(repo, additions, private=private)


def _commit(repo: str, additions: list[Any], *, private: bool) -> str:
    """Create the repository if it does not exist, and upload the files in one commit; return its URL."""
    with _translated_errors(repo):
        api = _api()
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.create_commit(repo, additions, commit_message=_MESSAGE)
        return str(url)


def license_of(hub_id: str | None) -> str | None:
    """Read the license from a model's card on the Hub; None if unknown."""
    if hub_id is None:
        return None
    with contextlib.suppress(UserError), _translated_errors(hub_id):
        card = _api().model_info(hub_id).card_data
        return None if card is None else card.get("license")
    return None


def _api() -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # output usually goes to a log file
    return HfApi(token=hub_token())


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Print ``text`` at once, and with the elapsed time every few seconds until the end of the block."""
    start, finished = time.monotonic(), threading.Event()

    def show() -> None:
        while not finished.wait(PROGRESS_INTERVAL_S):
            print(f"{text}, {time.monotonic() - start:.0f} s", flush=True)

    print(text, flush=True)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


@contextlib.contextmanager
def _translated_errors(repo: str) -> Iterator[None]:
    """Translate errors of huggingface_hub to UserError, temporary ones to UnreachedError."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (HfHubHTTPError, OfflineModeIsEnabled, LocalTokenNotFoundError, httpx2.HTTPError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise UserError(
                "HF_TOKEN: the Hugging Face Hub rejects this token.", f"Create one at {_TOKENS}"
            ) from None
        if status in (403, 404):
            raise UserError(
                f"HF_TOKEN: this token may not write to {repo} (HTTP {status}).",
                f"Create one with write access at {_TOKENS}",
            ) from None
        if status is None or status >= 500 or status == 429:
            problem = f"returns HTTP {status}" if status else f"cannot be reached ({type(error).__name__})"
            raise UnreachedError(
                f"{repo}: the Hugging Face Hub {problem}.",
                "Check the network (HF_ENDPOINT, proxies). A retry sends only the missing files.",
            ) from None
        raise UserError(f"{repo}: the Hugging Face Hub returns HTTP {status}: {error}") from None
