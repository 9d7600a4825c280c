"""infra/docker/fetch_signed.sh with a real GnuPG and a curl that reads from a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "docker" / "fetch_signed.sh"
CURL = """#!/usr/bin/env bash
# Called with --output FILE URL at the end; the URL's last part is a file of PUBLISHED
exec cp "$PUBLISHED/${@: -1:1}" "${@: -2:1}"
"""
pytestmark = pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")


class Publisher:
    """A folder with a file, its signature and a key."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "published"
        self.folder.mkdir()
        (self.folder / "tool.tar.gz").write_bytes(b"what was published")
        (place / "bin").mkdir()
        (place / "bin" / "curl").write_text(CURL.replace("${@: -1:1}", '$(basename "${@: -1:1}")'))
        (place / "bin" / "curl").chmod(0o755)
        self.fingerprint = self.sign("somebody@example.org")

    def _gpg(self, *arguments: str) -> str:
        home = self.place / "keys"
        home.mkdir(mode=0o700, exist_ok=True)
        command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--passphrase", "", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    def sign(self, who: str) -> str:
        """Sign the file with a new key; return its fingerprint."""
        self._gpg("--quick-generate-key", who, "ed25519", "sign", "never")
        listed = self._gpg("--with-colons", "--list-keys", who)
        fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr"))
        file = self.folder / "tool.tar.gz"
        self._gpg("--local-user", who, "--output", f"{file}.sig", "--detach-sign", str(file))
        (self.folder / "tool.key").write_text(self._gpg("--armor", "--export", who))
        return fingerprint

    def fetched(self, fingerprint: str) -> subprocess.CompletedProcess[str]:
        work = self.place / "work"
        work.mkdir(exist_ok=True)
        path = f"{self.place / 'bin'}:{os.environ['PATH']}"
        arguments = ["https://example.org/tools", "tool.tar.gz", "tool.key", fingerprint]
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            cwd=work,
            env={**os.environ, "PATH": path, "PUBLISHED": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    yield Publisher(tmp_path)
    agent = ["gpgconf", "--homedir", str(tmp_path / "keys"), "--kill", "gpg-agent"]
    subprocess.run(agent, timeout=60, check=True)


def test_a_file_signed_by_the_given_key_is_kept(publisher: Publisher) -> None:
    done = publisher.fetched(publisher.fingerprint)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (publisher.place / "work").iterdir()] == ["tool.tar.gz"]
    assert (publisher.place / "work" / "tool.tar.gz").read_bytes() == b"what was published"


@pytest.mark.parametrize("fault", ["changed since", "signed by another key", "not signed"])
def test_a_file_without_a_signature_of_the_given_key_is_refused(publisher: Publisher, fault: str) -> None:
    if fault == "changed since":
        (publisher.folder / "tool.tar.gz").write_bytes(b"something else")
    elif fault == "not signed":
        (publisher.folder / "tool.tar.gz.sig").write_bytes(b"")
    else:
        publisher.sign("stranger@example.org")
    done = publisher.fetched(publisher.fingerprint)
    assert done.returncode == 1
    message = f"https://example.org/tools/tool.tar.gz has no signature of the key {publisher.fingerprint}."
    assert message in done.stderr
    assert list((publisher.place / "work").iterdir()) == []
