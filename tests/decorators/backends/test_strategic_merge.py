"""A pod template is patched like Kubernetes does."""

from __future__ import annotations

from decorators.backends.strategic_merge import merge

POD = {
    "metadata": {"annotations": {"a": "1"}},
    "spec": {
        "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"key": "gpu"}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "containers": [
            {
                "name": "train",
                "image": "i",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "resources": {"limits": {"cpu": "8"}},
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
    },
}


def test_maps_and_keyed_lists_are_merged_and_other_lists_replaced() -> None:
    patch = {
        "metadata": {"annotations": {"b": "2"}},
        "spec": {
            "hostNetwork": True,
            "tolerations": [{"key": "mine"}],
            "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "more", "emptyDir": {}}],
            "containers": [
                {
                    "name": "train",
                    "env": [{"name": "B", "value": "3"}, {"name": "A", "$patch": "delete"}],
                    "resources": {"limits": {"rdma/hca": "1"}},
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    merged = merge(POD, patch)
    spec = merged["spec"]
    train, sidecar = spec["containers"]
    assert merged["metadata"]["annotations"] == {"a": "1", "b": "2"}
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"disk": "nvme"}, [{"key": "mine"}])
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert train["env"] == [{"name": "B", "value": "3"}]
    assert (train["resources"]["limits"], train["image"]) == ({"cpu": "8", "rdma/hca": "1"}, "i")
    assert sidecar == {"name": "sidecar", "image": "s"}
    assert len(POD["spec"]["volumes"]) == 1, "the original stays as it is"


def test_null_removes_a_value_and_patch_directives_replace_or_delete() -> None:
    patch = {
        "spec": {
            "nodeSelector": {"$patch": "replace", "zone": "a"},
            "tolerations": None,
            "volumes": [{"$patch": "replace"}, {"name": "only", "emptyDir": {}}],
        }
    }
    spec = merge(POD, patch)["spec"]
    assert spec["nodeSelector"] == {"zone": "a"}
    assert "tolerations" not in spec
    assert [volume["name"] for volume in spec["volumes"]] == ["only"]
