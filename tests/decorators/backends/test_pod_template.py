"""A patch for training pods is read, or refused in two lines before submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decorators.backends.options import Options
from decorators.backends.pod_template import read
from estimator.errors import UserError

GOOD = """
metadata:
  annotations: {k8s.v1.cni.cncf.io/networks: rail}
spec:
  hostNetwork: true
  tolerations: [{key: mine, operator: Exists}]
  volumes:
    - {$patch: replace}
    - {name: lustre, hostPath: {path: /lustre}}
  containers:
    - name: main
      resources: {limits: {rdma/hca: 1}}
      securityContext: {capabilities: {add: [IPC_LOCK]}}
      env: [{name: NCCL_DEBUG, value: INFO}, {name: OLD, $patch: delete}]
      volumeMounts: [{name: lustre, mountPath: /lustre}]
  priorityClassName: null
"""


def test_a_pod_template_is_read_from_a_file_or_a_mapping_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(GOOD)
    patch = read(str(file))
    assert patch["spec"]["hostNetwork"] is True
    assert read(patch) == patch
    settings = {"resources": {"pod_template": str(file), "fabric": "roce"}}
    options = Options.from_values({"settings": settings})
    assert (options.pod_template, options.fabric) == (patch, "roce")
    from_settings = Options.from_values({"set": ("resources.pod_template={spec: {hostNetwork: true}}",)})
    assert from_settings.pod_template == {"spec": {"hostNetwork": True}}


@pytest.mark.parametrize(
    ("patch", "problem", "advice"),
    [
        (
            {"spec": {"hostNetwrk": True}},
            "spec.hostNetwrk is not a field of a pod template",
            "Did you mean hostNetwork?",
        ),
        ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork is 'yes', and must be true or false", "Correct"),
        (
            {"spec": {"containers": {"name": "main"}}},
            "spec.containers is {'name': 'main'}, and must be a list",
            "",
        ),
        ({"spec": {"containers": [{"env": []}]}}, "spec.containers[0] has no name", "The training container"),
        (
            {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": 1}]}]}},
            "spec.containers[0].env[0].value is 1, and must be text",
            "Correct",
        ),
        ({}, "must be a mapping", "Write a patch"),
        ("absent.yaml", "resources.pod_template absent.yaml cannot be read", "Name a YAML file."),
    ],
)
def test_an_invalid_pod_patch_is_named_by_its_path(patch: Any, problem: str, advice: str) -> None:
    with pytest.raises(UserError) as refused:
        read(patch)
    assert problem in refused.value.problem
    assert advice in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2
