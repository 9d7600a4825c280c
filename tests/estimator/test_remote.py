"""Requests to AWS in the log."""

from __future__ import annotations

import logging

import pytest

from estimator.remote import log_requests


def test_requests_to_aws_are_logged_by_operation_and_status_without_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    boto3 = pytest.importorskip("boto3")
    from botocore.stub import Stubber

    client = log_requests(
        boto3.client(
            "s3",
            region_name="us-east-1",
            aws_access_key_id="AKIAIOSFODNN7EXAMPLE",
            aws_secret_access_key="correct-horse-battery",
        )
    )
    caplog.set_level(logging.DEBUG, logger="estimator.remote")
    with Stubber(client) as stub:
        stub.add_response("list_buckets", {"Buckets": []})
        stub.add_client_error("get_object", "AccessDenied", http_status_code=403)
        client.list_buckets()
        with pytest.raises(client.exceptions.ClientError):
            client.get_object(Bucket="bucket", Key="key")
    lines = [record.getMessage() for record in caplog.records if record.name == "estimator.remote"]
    expected = [("s3", "ListBuckets", "200"), ("s3", "GetObject", "403")]
    for line, parts in zip(lines, expected, strict=True):
        assert all(part in line for part in parts)
    assert "AKIA" not in caplog.text
