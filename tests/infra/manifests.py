"""Objects rendered from infra/kubernetes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "infra" / "kubernetes"
Json = dict[str, Any]


def missing() -> str | None:
    """Return the reason why kubectl cannot render here, or None."""
    if shutil.which("kubectl") is None:
        return "no kubectl on this machine"
    command = ["kubectl", "version", "--client", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    version = json.loads(done.stdout)["clientVersion"]
    if (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 21):
        return f"kubectl {version['gitVersion']} is too old for Kustomize's components"
    return None


needs_kubectl = pytest.mark.skipif(bool(missing()), reason=missing() or "")


@cache
def render(folder: Path) -> tuple[Json, ...]:
    """Return the objects of a kustomization."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def everything(folder: Path) -> tuple[Json, ...]:
    """Render base, all queues and all components together through a new kustomization."""
    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [_relative_path(folder, path) for path in (KUBERNETES / "base", *queues())],
        "components": [
            _relative_path(folder, path) for path in sorted((KUBERNETES / "components").iterdir())
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(listed))
    return render(folder)


def queues() -> list[Path]:
    return sorted(path for path in (KUBERNETES / "queues").iterdir() if path.name != "template")


def of_kind(objects: tuple[Json, ...], kind: str) -> list[Json]:
    return [item for item in objects if item["kind"] == kind]


def _relative_path(folder: Path, path: Path) -> str:
    return os.path.relpath(path, folder.resolve())  # kustomize takes no absolute paths
