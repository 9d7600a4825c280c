"""Secrets of a user, and a search for them in everything that a run prints and stores."""

from __future__ import annotations

import base64
import gzip
import io
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

SECRETS = {
    "HF_TOKEN": "hf_" + "TheTokenOfTheTest" * 2,
    "AWS_ACCESS_KEY_ID": "AKIA" + "TESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "the/aws+secret/of/the/test",
    "AWS_SESSION_TOKEN": "the-aws-session-of-the-test",
    "METAFLOW_SERVICE_AUTH_KEY": "the-service-key-of-the-test",
    "WANDB_API_KEY": "the-tracker-key-of-the-test",
    "CHECKLIST_WEBHOOK_URL": "http://127.0.0.1:9/services/the-webhook-of-the-test",
}


def files_below(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of every file, and of what it contains if it is compressed or a card."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                yield from unpacked(str(path.relative_to(folder)), path.read_bytes())


def unpacked(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a stored object, its decompressed content, and the files of a code package."""
    yield name, content
    if content[:2] == b"\x1f\x8b":  # gzip: an artifact, or a code package
        content = gzip.decompress(content)
        yield f"{name} (decompressed)", content
        if content[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(content)) as package:
                for member in package.getmembers():
                    if member.isfile():
                        file = package.extractfile(member)
                        yield f"{name}: {member.name}", file.read() if file is not None else b""


def leaks(
    places: Iterable[tuple[str, bytes]], secrets: Collection[str] = tuple(SECRETS.values())
) -> list[str]:
    """Return the names of the places that contain a secret, as plain text or in base64 (as in cards)."""
    patterns = [form for secret in secrets for form in _forms(secret.encode())]
    return sorted({name for name, content in places if any(pattern in content for pattern in patterns)})


def _forms(secret: bytes) -> list[bytes]:
    """Return the secret and its base64 at each offset, without the characters that neighbors change."""
    forms = [secret]
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + secret)
        first = -(-offset * 8 // 6)
        last = (offset + len(secret)) * 8 // 6
        forms.append(encoded[first:last])
    return forms
