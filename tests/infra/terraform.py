"""Terraform on a copy of infra/aws, with a local provider plugin and moto as AWS."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STACK = ROOT / "infra" / "aws"
PLUGINS = "registry.terraform.io/hashicorp/aws"
# Where people and images keep plugins beside the folder that TERRAFORM_PLUGINS names
USUAL = ("~/.terraform.d/plugins", "/usr/share/terraform/plugins", "/usr/local/share/terraform/plugins")
OVERRIDE = """
provider "aws" {
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
}
"""


@cache
def plugins() -> Path | None:
    """Return the folder with the AWS provider, or None."""
    return next((path for path in _places() if (path / PLUGINS).is_dir()), None)


def _places() -> Iterator[Path]:
    if named := os.environ.get("TERRAFORM_PLUGINS"):
        yield Path(named)
    yield from (Path(path).expanduser() for path in USUAL)
    yield from sorted(Path("/opt").glob("*"))


def missing() -> str | None:
    """Return the reason why Terraform cannot run here, or None."""
    if shutil.which("terraform") is None:
        return "no terraform on this machine"
    if plugins() is None:
        return "no folder of Terraform plugins with hashicorp/aws: TERRAFORM_PLUGINS names one"
    return None


@dataclass(frozen=True)
class Stack:
    """An initialized copy of infra/aws."""

    folder: Path  # of the .tf files
    endpoint: str  # moto's

    def run(self, *arguments: str, values: dict[str, Any] | None = None, limit_s: float = 540) -> Done:
        """``values`` are the stack's variables."""
        if values is not None:
            (self.folder / "test.auto.tfvars.json").write_text(json.dumps(values))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TF_"))
        }
        environment |= {
            "TF_CLI_CONFIG_FILE": str(self.folder / "plugins.tfrc"),
            "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        done = subprocess.run(
            ["terraform", *arguments, "-no-color"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Done:
    """The output of Terraform."""

    status: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> str:
        """Return the messages without frames and line breaks."""
        return " ".join(re.sub(r"[│╷╵]", " ", self.stderr).split())


def prepare(place: Path, endpoint: str) -> Stack:
    """Return the stack in its own folder, next to the instance table that it reads."""
    folder = place / "infra" / "aws"
    folder.mkdir(parents=True)
    for file in (*STACK.glob("*.tf"), *STACK.glob("*.sh"), STACK / ".terraform.lock.hcl"):
        shutil.copy(file, folder)
    (folder / "test_override.tf").write_text(OVERRIDE)
    mirror = f'provider_installation {{\n  filesystem_mirror {{\n    path = "{plugins()}"\n  }}\n}}\n'
    (folder / "plugins.tfrc").write_text(mirror)
    data = place / "estimator" / "data"
    data.mkdir(parents=True)
    shutil.copy(ROOT / "estimator" / "data" / "instances.csv", data)
    stack = Stack(folder, endpoint)
    done = stack.run("init", "-input=false", "-backend=false", "-lockfile=readonly")
    assert done.status == 0, done.stderr
    return stack
