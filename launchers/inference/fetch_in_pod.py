"""Fetch a bundle (launchers.store.bundles) from S3 into a folder.

    python3 fetch_in_pod.py s3://BUCKET/KEY FOLDER

Runs in an init container that has boto3 and not this package: no import from it.
"""

import hashlib
import json
import sys
from pathlib import Path


def fetch(address: str, folder: Path) -> None:
    """Fetch all files of the bundle. Exits with one line if a file is damaged or leads out of the folder."""
    import boto3

    bucket, _, key = address.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    manifest = json.load(s3.get_object(Bucket=bucket, Key=f"{key}/manifest.json")["Body"])
    for file in manifest["files"]:
        path = folder / file["name"]
        if folder.resolve() not in path.resolve().parents:
            sys.exit(f"{address}: {file['name']!r} is not a path inside a folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, f"{key}/{file['sha256'][:16]}-{path.name}", str(path))
        digest = hashlib.sha256()
        with path.open("rb") as content:
            while chunk := content.read(2**22):
                digest.update(chunk)
        if digest.hexdigest() != file["sha256"]:
            sys.exit(f"{address}: {file['name']} has changed since it was stored.")
        print(f"fetched {file['name']!r}", flush=True)


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
