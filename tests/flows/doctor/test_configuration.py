"""Profile, datastore and metadata service of Metaflow: working and broken ones."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.flows.doctor.conftest import QueryProbe
from tests.http_server import serving

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDOCTOR", "AWS_SECRET_ACCESS_KEY": "secret-of-doctor"}
S3 = {
    **KEYS,
    "AWS_DEFAULT_REGION": "us-east-1",
    "METAFLOW_DEFAULT_DATASTORE": "s3",
    "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow",
}


def test_a_local_datastore_is_tested_by_writing_and_left_empty(
    query_probe: QueryProbe, tmp_path: Path
) -> None:
    line = query_probe("datastore")["datastore"]
    assert (line.state, line.found) == ("ok", f"local, {tmp_path / '.metaflow'}: can be read and written")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_datastore_root_is_reported_with_the_variable_that_sets_it(
    query_probe: QueryProbe, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    root = str(tmp_path / "file")
    line = query_probe("datastore", METAFLOW_DATASTORE_SYSROOT_LOCAL=root)["datastore"]
    assert (line.state, line.found) == ("no", f"local, {root}/.metaflow: Not a directory")
    assert "METAFLOW_DATASTORE_SYSROOT_LOCAL" in line.fix


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server with the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.create_bucket(Bucket="bucket")
    yield url
    assert "Contents" not in client.list_objects_v2(Bucket="bucket")  # what was written was taken away
    server.stop()


def test_an_s3_datastore_is_tested_by_writing_and_reading(query_probe: QueryProbe, s3: str) -> None:
    line = query_probe("datastore", METAFLOW_S3_ENDPOINT_URL=s3, **S3)["datastore"]
    assert (line.state, line.found) == ("ok", "s3://bucket/metaflow can be read and written")


def test_a_missing_s3_bucket_is_reported(query_probe: QueryProbe, s3: str) -> None:
    values = {**S3, "METAFLOW_S3_ENDPOINT_URL": s3, "METAFLOW_DATASTORE_SYSROOT_S3": "s3://other/x"}
    line = query_probe("datastore", **values)["datastore"]
    assert line.state == "no"
    assert "NoSuchBucket" in line.found
    assert line.fix


def test_an_s3_that_does_not_answer_ends_within_the_limit(query_probe: QueryProbe) -> None:
    s3_settings = {"METAFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:9", "FINETUNE_DATASTORE_TIMEOUT": "0.02"}
    line = query_probe("datastore", 40, **S3, **s3_settings)["datastore"]
    assert line.state == "no"
    assert "has not responded" in line.found
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in f"{line}"


def test_an_s3_without_a_root_names_the_variable(query_probe: QueryProbe) -> None:
    line = query_probe("datastore", METAFLOW_DEFAULT_DATASTORE="s3")["datastore"]
    assert line.state == "no"
    assert "METAFLOW_DATASTORE_SYSROOT_S3" in line.fix


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "there is no"), ("{broken", "JSONDecodeError"), ("{}", "config_mine.json")],
)
def test_the_profile_that_metaflow_reads_is_named(
    content: str | None, expected: str, query_probe: QueryProbe, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config_mine.json").write_text(content)
    line = query_probe("profile", METAFLOW_HOME=str(tmp_path), METAFLOW_PROFILE="mine")["profile"]
    assert line.state == ("ok" if content == "{}" else "no")
    assert expected in line.found
    assert str(tmp_path / "config_mine.json") in line.found


class Service(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ping" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_the_state_of_the_metadata_service_is_reported(query_probe: QueryProbe) -> None:
    values = {"METAFLOW_DEFAULT_METADATA": "service"}
    with serving(Service) as url:
        answering = query_probe("metadata", METAFLOW_SERVICE_URL=url, **values)["metadata"]
        wrong = query_probe("metadata", METAFLOW_SERVICE_URL=f"{url}/elsewhere", **values)["metadata"]
    unreachable_service = query_probe("metadata", METAFLOW_SERVICE_URL=url, **values)["metadata"]
    unset = query_probe("metadata", METAFLOW_SERVICE_URL="", **values)["metadata"]
    assert [line.state for line in (answering, wrong, unreachable_service, unset)] == ["ok", "no", "no", "no"]
    assert "404" in wrong.found
    assert "refused" in unreachable_service.found
    assert "METAFLOW_SERVICE_URL is not set" in unset.found
