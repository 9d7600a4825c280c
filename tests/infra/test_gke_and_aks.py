"""infra/gke and infra/aks: format, and names and counts that match other files.

Their providers are not available to the tests, which therefore check no names of arguments.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from estimator import hardware
from estimator.hardware.cluster import tables
from estimator.untrusted import parse_yaml
from tests.infra.manifests import KUBERNETES, ROOT

STACKS = {"gke": "gcp", "aks": "azure"}
needs_terraform = pytest.mark.skipif(shutil.which("terraform") is None, reason="no terraform on this machine")


def text_of(stack: str) -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "infra" / stack).glob("*.tf")))


@needs_terraform
@pytest.mark.parametrize("stack", STACKS)
def test_terraform_files_are_formatted(stack: str) -> None:
    command = ["terraform", "fmt", "-check", "-diff", str(ROOT / "infra" / stack)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("stack", "cloud"), STACKS.items())
def test_every_variable_is_declared_and_used_and_the_example_sets_those_without_a_default(
    stack: str, cloud: str
) -> None:
    text = text_of(stack)
    declared = dict(re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == set(declared)
    example = (ROOT / "infra" / stack / "terraform.tfvars.example").read_text()
    example_variables = set(re.findall(r"^(\w+) +=", example, re.MULTILINE))
    required = {name for name, body in declared.items() if not re.search(r"^  default ", body, re.MULTILINE)}
    assert example_variables == required
    (machine,) = re.findall(r'gpu_pool += \{ \w+ = "([\w-]+)"', example)
    instance = hardware.current().find_instance(machine)
    assert instance is not None
    assert (instance.cloud, instance.gpu) == (cloud, "H100 SXM")


@pytest.mark.parametrize("stack", STACKS)
def test_service_accounts_match_the_kubernetes_base(stack: str) -> None:
    text = (KUBERNETES / "base" / "service-accounts.yaml").read_text()
    accounts = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in parse_all(text)}
    joined = text_of(stack)
    for namespace, name in accounts:
        assert re.search(rf'{namespace}/sa/{name}"|{name} += "{namespace}"', joined), (namespace, name)


def test_gke_nodes_have_the_networks_that_their_fabric_uses() -> None:
    """Interfaces in the variables of the daemons: NCCL_GPUDIRECTTCPX_SOCKET_IFNAME and --num_nics."""
    networks = dict(re.findall(r'"(a3-[\w-]+)" = (\d)', re.search(r"lookup\((.*)", text_of("gke"))[1]))  # type: ignore[index]
    fabrics = (ROOT / "decorators" / "backends" / "data" / "pod_fabrics.yaml").read_text()
    (interfaces,) = re.findall(r'TCPX_SOCKET_IFNAME, value: "([\w,]+)"', fabrics)
    (nics,) = re.findall(r"--num_nics=(\d+)", fabrics)
    assert networks == {"a3-highgpu-8g": str(len(interfaces.split(","))), "a3-megagpu-8g": nics}


def test_gke_machines_are_in_the_catalog_and_match_the_gpu_labels() -> None:
    text = text_of("gke")
    (block,) = re.findall(r"accelerators = \{(.*?)\}", text, re.DOTALL)
    for machine, accelerator in re.findall(r'"([\w-]+)" += "([\w-]+)"', block):
        instance = hardware.current().find_instance(machine)
        assert instance is not None, machine
        labels = {value for row in tables.labels_of(instance.gpu, "gke") for _, value in row.labels}
        assert accelerator in labels, machine


def parse_all(text: str) -> list[dict[str, dict[str, str]]]:
    return [parse_yaml(part) for part in text.split("---\n") if part.strip()]
