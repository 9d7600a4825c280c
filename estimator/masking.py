"""Masking of secrets in text that is shown or stored: logs, errors of ranks, lines of ``finetune doctor``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

MASK = "***"
_SECRET_NAME = re.compile(
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(?:API|ACCESS|AUTH|PRIVATE)_?KEY|CONNECTION_STRING"
    r"|CREDENTIALS?|WEBHOOK)(?![A-Z])|_(?:PASS|PWD)$",  # not of TOKENIZERS_PARALLELISM, MAX_TOKENS
    re.IGNORECASE,
)
_NAME_OF_A_PATH = re.compile(r"_(?:FILE|PATH|DIR)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_PLAIN_VALUE = re.compile(r"true|false|none|[\d.]{,11}", re.IGNORECASE)  # switches, numbers
_BLOCK_BYTES = 1 << 20  # of complete lines that are masked together
_MIN_LENGTH = 4  # characters; shorter values occur in ordinary text
_MIN_PART_LENGTH = 8  # shorter values may be a part of ordinary words, and are masked as complete words only
# Each pattern keeps group 1 and masks the rest of the match.
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(://)[^/@\s]+(?=@)",  # user and password in a URL
        r"(\bhf_)[A-Za-z0-9]{16,}",  # Hugging Face access tokens
        r"(\b(?:AKIA|ASIA))[A-Z0-9]{16}\b",  # AWS access key IDs
        r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}",
        r"(?i)(\bX-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"']+",  # presigned S3 URLs
        r"(https://hooks\.slack\.com/)[\w/-]+",
    )
)


def mask_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace secrets in ``text`` by ``***``.

    A secret is a login in a URL, text in the format of a Hugging Face token, an AWS key, a bearer token, a
    presigned S3 URL or a Slack webhook, or the value of an environment variable with the word TOKEN, SECRET,
    WEBHOOK or the like in its name. Paths, switches and numbers of at most 11 digits are no secrets.
    """
    values = [
        value
        for name, value in environment.items()
        if len(value) >= _MIN_LENGTH
        and _SECRET_NAME.search(name)
        and not _NAME_OF_A_PATH.search(name)
        and not _PLAIN_VALUE.fullmatch(value)
    ]
    for value in sorted(values, key=len, reverse=True):  # one value may be a prefix of another
        if len(value) < _MIN_PART_LENGTH:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", MASK, text)
        else:
            text = text.replace(value, MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def mask_file(path: Path) -> None:
    """Mask the secrets in a finished log file; a file without secrets is not written."""
    masked_file = path.with_name(f"{path.name}.masked")
    changed = False
    with path.open("rb") as source, masked_file.open("wb") as masked:
        while block := b"".join(source.readlines(_BLOCK_BYTES)):
            text = mask_secrets(block.decode(errors="surrogateescape")).encode(errors="surrogateescape")
            changed = changed or text != block
            masked.write(text)
    masked_file.replace(path) if changed else masked_file.unlink()
