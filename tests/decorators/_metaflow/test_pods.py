"""Pods of an Argo workflow: field names are converted to camel case, resource names are not."""

from __future__ import annotations

from decorators._metaflow.pods import _with_camel_case


def test_resource_names_are_not_converted_to_camel_case() -> None:
    limits = {"rdma/hca_shared_devices_a": "1", "cpu": "4"}
    container = {"volume_mounts": [{"mount_path": "/dev/shm"}], "resources": {"limits": limits}}
    expected_container = {"volumeMounts": [{"mountPath": "/dev/shm"}], "resources": {"limits": limits}}
    assert _with_camel_case(container) == expected_container
