"""A local S3 (moto server) as the datastore of Metaflow."""

from __future__ import annotations

import secrets
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from tests.lab.api import Inside
from tests.lab.control_plane import free_ports, start_process, wait_for

BUCKET = "metaflow-lab"
REGION = "us-east-1"
_START_S = 60.0


class ObjectStore:
    """A context manager. ``address`` belongs to the network that ``inside`` enters."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        inside: Inside = nullcontext,
    ) -> None:
        self._address, self._inside, self._log = address, inside, folder / "s3.log"
        # Any are accepted. These are found nowhere else, so a test can look for them.
        self.keys = {
            "AWS_ACCESS_KEY_ID": "AKIA" + secrets.token_hex(8).upper(),
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        }

    def __enter__(self) -> ObjectStore:
        (self.port,) = free_ports(1, self._address, self._inside)
        self.url = f"http://{self._address}:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", self._address, "-p", str(self.port)]
        self._process = start_process(command, self._log, inside=self._inside)
        try:
            wait_for(self._make_bucket, _START_S, "the S3 server answers", every=0.3)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)

    def credentials(self) -> dict[str, str]:
        """Return the variables of an AWS SDK; pods would get them from their service account."""
        return {**self.keys, "AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Return the variables of a Metaflow datastore; ``url``: address of a proxy."""
        return {
            **self.credentials(),
            "METAFLOW_S3_ENDPOINT_URL": url or self.url,
            "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{BUCKET}/metaflow",
            "METAFLOW_DATATOOLS_S3ROOT": f"s3://{BUCKET}/data",
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            # Of 64 processes for each operation, which all load boto3: a lab has a few cores
            "METAFLOW_S3_WORKER_COUNT": "2",
        }

    def objects(self) -> dict[str, bytes]:
        """Return all objects by key."""
        with self._inside():
            client = self._client()
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
            return {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def keys_below(self, prefix: str) -> list[str]:
        with self._inside():
            pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
            return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def _make_bucket(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            with self._inside():
                self._client(attempts=1).create_bucket(Bucket=BUCKET)
        except BotoCoreError:
            return False
        return True

    def _client(self, attempts: int = 3) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self.keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.keys["AWS_SECRET_ACCESS_KEY"],
            config=Config(retries={"max_attempts": attempts}, connect_timeout=5, proxies={}),
        )
