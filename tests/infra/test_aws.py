"""infra/aws: created resources, refused variables, and its output as a Metaflow configuration.

moto plays AWS. It knows neither placement groups nor the subscribers of a budget: those are planned here, and
not made.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from email import message_from_string
from pathlib import Path
from typing import Any

import boto3
import metaflow.metaflow_config
import pytest
import requests

from decorators.backends import tables
from decorators.backends.options import Options
from estimator import hardware
from flows.cluster_check.launch import DEFAULTS
from flows.commands.run_options import OF_METAFLOW
from tests.infra.terraform import STACK, Done, Stack, missing, prepare
from tests.lab.control_plane import free_ports, start_process, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "")]
Planned = dict[str, dict[str, Any]]
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-a1b2c3"
POOL = {"instance_type": "p4d.24xlarge", "max_nodes": 2}
VALUES: dict[str, Any] = {
    "network": {"zones": ["us-east-1a"]},
    "gpu_pools": {
        "a100": POOL,
        "a10g": {"instance_type": "g5.2xlarge", "max_nodes": 4, "spot_nodes": 3, "instance_store": False},
        "b300": {"instance_type": "p6-b300.48xlarge", "max_nodes": 1, "image_id": "ami-0123456789abcdef0"},
    },
    "secret_arns": [SECRET],
    "metadata_service_url": "http://metadata.internal:8080",
    "nightly_check": {"pool": "a100", "image": "launcher:1", "on_nodes": "torchtune:1"},
    "alert_emails": ["platform@example.com"],
    "monthly_budget_usd": 20000,
}
MADE = {
    **VALUES,
    "gpu_pools": {key: {**pool, "placement_group": False} for key, pool in VALUES["gpu_pools"].items()},
    "monthly_budget_usd": None,
}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of moto, with the managed policies that the stack attaches."""
    (port,) = free_ports(1, "127.0.0.1", nullcontext)
    folder = tmp_path_factory.mktemp("moto")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    server = start_process(command, folder / "moto.log", environment)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(address), 240, "moto answers")
        yield address
    finally:
        server.kill()
        server.wait(10)


def _answers(address: str) -> bool:
    try:
        return requests.get(f"{address}/moto-api/data.json", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, aws: str) -> Stack:
    return prepare(tmp_path_factory.mktemp("stack"), aws)


@pytest.fixture(scope="module")
def planned(stack: Stack) -> Planned:
    """The planned values of each resource, by its address."""
    done = stack.run("plan", "-input=false", "-out=whole", values=VALUES)
    assert done.status == 0, done.errors
    shown = json.loads(stack.run("show", "-json", "whole").stdout)
    return {
        item["address"]: item.get("values", {})
        for item in shown["planned_values"]["root_module"]["resources"]
    }


def test_terraform_files_are_formatted_and_valid(stack: Stack) -> None:
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-diff", str(STACK)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    done = stack.run("validate")  # type: ignore[assignment]
    assert done.status == 0, done.errors  # type: ignore[attr-defined]


# -- what is planned -------------------------------------------------------------------------------------


def test_a_node_has_an_efa_interface_on_each_efa_card_and_one_ip_address(planned: Planned) -> None:
    """Expected values: EC2's guide to machines with several network cards. Card 0 of p6-b300 has no EFA."""
    cards = {
        pool: [
            (card["network_card_index"], card["device_index"], card["interface_type"])
            for card in planned[f'aws_launch_template.gpu["{pool}-multi"]']["network_interfaces"]
        ]
        for pool in VALUES["gpu_pools"]
    }
    assert cards == {
        "a100": [(0, 0, "efa"), *((index, 1, "efa-only") for index in range(1, 4))],
        "a10g": [],
        "b300": [(0, 0, "interface"), *((index, 0, "efa-only") for index in range(1, 17))],
    }
    for pool, pools in VALUES["gpu_pools"].items():
        machine = hardware.current().find_instance(pools["instance_type"])
        efa = [card for card in cards[pool] if card[2].startswith("efa")]
        assert len(efa) == tables.efa_interfaces(machine)
    assert not planned['aws_launch_template.gpu["a10g-spot"]']["network_interfaces"]


def test_the_machine_image_of_a_pool_replaces_the_ecs_optimized_image(planned: Planned) -> None:
    images = {
        pool: planned[f'aws_batch_compute_environment.gpu["{pool}-multi"]']["compute_resources"][0][
            "ec2_configuration"
        ][0]
        for pool in ("a100", "b300")
    }
    assert images["b300"]["image_id_override"] == "ami-0123456789abcdef0"
    assert not images["a100"].get("image_id_override")
    assert images["a100"]["image_type"] == "ECS_AL2023_NVIDIA"


def test_several_nodes_are_on_demand_in_one_zone_and_one_placement_group(planned: Planned) -> None:
    environment = planned['aws_batch_compute_environment.gpu["a100-multi"]']
    (resources,) = environment["compute_resources"]
    assert environment["type"] == "MANAGED"
    assert (resources["type"], resources["placement_group"]) == ("EC2", "finetune-a100-multi")
    assert planned['aws_placement_group.gpu["a100-multi"]']["strategy"] == "cluster"
    (spot_resources,) = planned['aws_batch_compute_environment.gpu["a10g-spot"]']["compute_resources"]
    assert not spot_resources["placement_group"]
    assert resources["instance_type"] == ["p4d.24xlarge"]
    assert (resources["min_vcpus"], resources["max_vcpus"]) == (0, 2 * 96)
    (queue,) = planned['aws_batch_job_queue.multi["a100"]']["compute_environment_order"]
    assert queue["order"] == 1  # nothing else: Batch starts no run on several nodes on spot machines


def test_single_node_jobs_prefer_spot_in_pools_that_have_it(planned: Planned) -> None:
    assert {
        name.split('"')[1]: item["compute_resources"][0]["type"]
        for name, item in planned.items()
        if name.startswith("aws_batch_compute_environment.gpu[")
    } == {
        "a100-multi": "EC2",
        "a10g-multi": "EC2",
        "a10g-spot": "SPOT",
        "b300-multi": "EC2",
    }
    assert len(planned['aws_batch_job_queue.single["a10g"]']["compute_environment_order"]) == 2
    assert 'aws_batch_job_queue.single["a100"]' not in planned
    assert len(planned['aws_batch_job_queue.multi["a10g"]']["compute_environment_order"]) == 1


@pytest.mark.parametrize(
    "before", ['OPTIONS="--default-ulimit nofile=32768:65536"\n', "# nothing\n", "", None], ids=repr
)
def test_containers_may_pin_all_memory_for_efa(planned: Planned, tmp_path: Path, before: str | None) -> None:
    """The boothook runs twice on a file of a node."""
    scripts = {script for pool in ("a100", "a10g") for script in _boothooks(planned, pool)}
    (script,) = (script for script in scripts if "memlock" in script)
    file = tmp_path / "docker"
    if before is not None:
        file.write_text(before)
    for _ in range(2):
        command = ["bash", "-euc", script.replace("/etc/sysconfig/docker", str(file))]
        subprocess.run(command, check=True, timeout=60)
    (options,) = re.findall(r'^OPTIONS="(.*)"$', file.read_text(), re.MULTILINE)
    assert options.split().count("memlock=-1:-1") == 1
    assert ("nofile=32768:65536" in options) == ("nofile" in (before or ""))


def test_instance_disks_are_used_unless_the_pool_disables_them(planned: Planned) -> None:
    script = (STACK / "instance_store.sh").read_text().strip()
    assert [one.strip() == script for one in _boothooks(planned, "a100")] == [False, True]
    assert [one.strip() == script for one in _boothooks(planned, "a10g")] == [False]


def _boothooks(planned: Planned, pool: str) -> list[str]:
    """Return the boothook scripts of the machines of a pool."""
    (data,) = {
        base64.b64decode(item["user_data"]).decode()
        for name, item in planned.items()
        if name.startswith(f'aws_launch_template.gpu["{pool}-')
    }
    parts = message_from_string(data).get_payload()
    assert {part.get_content_type() for part in parts} == {"text/cloud-boothook"}
    return [part.get_payload() for part in parts]


def test_disks_hold_a_model_and_exceed_default_gp3_speed_and_metadata_is_one_hop_away(
    planned: Planned,
) -> None:
    """The default of gp3 is 125 MiB/s: 27 minutes for 200 GiB of weights."""
    for name, item in planned.items():
        if name.startswith("aws_launch_template."):
            (disk,) = item["block_device_mappings"][0]["ebs"]
            assert (disk["volume_type"], disk["volume_size"], disk["encrypted"]) == ("gp3", 500, "true"), name
            assert disk["throughput"] == (500 if name.endswith(".cpu") else 1000)
            assert disk["iops"] >= disk["throughput"] * 4  # EBS: at most 0.25 MiB/s for each
            (options,) = item["metadata_options"]
            assert (options["http_tokens"], options["http_put_response_hop_limit"]) == ("required", 1)


def test_a_job_that_cannot_start_is_canceled(planned: Planned) -> None:
    queues = [item for name, item in planned.items() if name.startswith("aws_batch_job_queue.")]
    assert len(queues) == 5  # of three pools, one of them for spot, and of steps without GPUs
    for queue in queues:
        limits = {each["reason"]: each for each in queue["job_state_time_limit_action"]}
        assert {each["action"] for each in limits.values()} == {"CANCEL"}
        assert limits["CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"]["max_time_seconds"] == 12 * 3600
        assert all(600 <= each["max_time_seconds"] <= 86400 for each in limits.values())  # Batch's bounds


def test_nodes_reach_each_other_and_https_and_accept_no_other_connection(planned: Planned) -> None:
    into = [name for name in planned if name.startswith("aws_vpc_security_group_ingress_rule.")]
    assert into == ["aws_vpc_security_group_ingress_rule.among_nodes"]
    assert planned[into[0]]["cidr_ipv4"] is None
    for way in ("ingress", "egress"):
        assert planned[f"aws_vpc_security_group_{way}_rule.among_nodes"]["ip_protocol"] == "-1"
    https = planned["aws_vpc_security_group_egress_rule.https"]
    assert (https["from_port"], https["to_port"], https["cidr_ipv4"]) == (443, 443, "0.0.0.0/0")


def test_max_nodes_is_the_number_of_machines_of_a_pool(planned: Planned) -> None:
    maximum = dict.fromkeys(VALUES["gpu_pools"], 0.0)
    for name, item in planned.items():
        if name.startswith("aws_batch_compute_environment.gpu["):
            pool = name.split('"')[1].rpartition("-")[0]
            machine = hardware.current().find_instance(VALUES["gpu_pools"][pool]["instance_type"])
            maximum[pool] += item["compute_resources"][0]["max_vcpus"] / machine.vcpu
    assert maximum == {pool: pools["max_nodes"] for pool, pools in VALUES["gpu_pools"].items()}


def test_job_logs_expire_and_jobs_read_only_the_named_secret(planned: Planned) -> None:
    logs = planned["aws_cloudwatch_log_group.jobs[0]"]
    assert (logs["name"], logs["retention_in_days"]) == ("/aws/batch/job", 30)
    (statement,) = json.loads(planned["aws_iam_policy.secrets[0]"]["policy"])["Statement"]
    assert (statement["Action"], statement["Resource"]) == ("secretsmanager:GetSecretValue", SECRET)
    assert "aws_iam_role_policy_attachment.job_secrets[0]" in planned


def test_the_budget_warns_its_subscribers(planned: Planned) -> None:
    budget = planned["aws_budgets_budget.monthly[0]"]
    assert (budget["limit_amount"], budget["time_unit"]) == ("20000", "MONTHLY")
    for item in budget["notification"]:
        assert item["subscriber_email_addresses"] == VALUES["alert_emails"]


def test_the_metadata_service_is_private_and_requires_a_key(stack: Stack) -> None:
    values = {
        **VALUES,
        "metadata_service_url": None,
        "metadata_service": {},
        "network": {"zones": ["us-east-1a", "us-east-1b"]},
    }
    done = stack.run("plan", "-input=false", "-refresh=false", "-out=metadata", values=values)
    assert done.status == 0, done.errors
    shown = json.loads(stack.run("show", "-json", "metadata").stdout)
    resources = shown["planned_values"]["root_module"]["resources"]
    items = {item["address"].partition("[")[0]: item.get("values", {}) for item in resources}
    assert items["aws_lb.metadata"]["internal"]
    assert items["aws_api_gateway_method.metadata"]["api_key_required"]
    database = items["aws_db_instance.metadata"]
    assert database["storage_encrypted"]
    assert not database.get("publicly_accessible")
    assert not database.get("password_wo")  # write-only: in no plan and no state
    (rule,) = items["aws_security_group.metadata_db"]["ingress"]
    assert (rule["from_port"], bool(rule.get("cidr_blocks"))) == (5432, False)
    (rule,) = items["aws_security_group.metadata"]["ingress"]
    assert (rule["from_port"], rule["to_port"]) == (8080, 8080)
    uses = {item["address"] for item in resources}
    assert 'aws_ecs_service.metadata["this"]' in uses
    (version,) = re.findall(r"metaflow_metadata_service:(v[\d.]+)", (STACK / "variables.tf").read_text())
    manifest = STACK.parent / "kubernetes" / "examples" / "metadata-service" / "service.yaml"
    assert f"metaflow_metadata_service:{version}" in manifest.read_text()


# -- what is refused -------------------------------------------------------------------------------------

BAD_POOLS = {
    "A100": POOL,
    "unknown": {**POOL, "instance_type": "p9.large"},
    "none": {**POOL, "max_nodes": 0},
    "small": {**POOL, "disk_gib": 8, "disk_mib_per_s": 2000},
    "block": {**POOL, "capacity_block": True},
    "both": {**POOL, "spot_nodes": 1, "capacity_reservation_id": "cr-1"},
    "spot": {**POOL, "spot_nodes": 2},
    "image": {**POOL, "image_id": "al2023"},
    "cpu": POOL,
}
BAD_CHECK = {"pool": "h100", "profile": "all", "schedule": "cron(0 3 * * *)", "silent_hours": 0.5}
# Terraform tells at once all that is wrong, but for variables held against another one that is wrong itself.
# (what is changed, what it says)
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"gpu_pools": BAD_POOLS, "nightly_check": None},
        [
            "gpu_pools: a key is 1 to 20 lower-case letters",
            "gpu_pools: a key is not cpu and does not end in -single",
            "gpu_pools: not every instance_type is an AWS machine of estimator/data/instances.csv",
            "gpu_pools: max_nodes is a whole number from 1 up",
            "gpu_pools: spot_nodes is a whole number from 0 up and less than max_nodes",
            "gpu_pools: image_id is the id of an AMI",
            "gpu_pools: disk_gib is at least 100",
            "gpu_pools: disk_mib_per_s is from 125 to 1000",
            "gpu_pools: capacity_block needs its capacity_reservation_id",
            "gpu_pools: a reservation is no spot capacity",
        ],
    ),
    (
        {
            "name": "My Stack",
            "network": {"vpc_id": "vpc-1", "cidr": "10.0.0.0/40"},
            "metadata_service_url": "metadata:8080",
            "nightly_check": None,
            "alert_emails": ["platform"],
            "bucket_name": "My_Bucket",
            "kms_key_arn": "alias/key",
            "job_logs": {"retention_days": 10},
            "secret_arns": ["hf"],
            "cpu_disk_mib_per_s": 8,
            "capacity_hours": 48,
            "monthly_budget_usd": None,
        },
        [
            "name: 2 to 20 lower-case letters",
            "network: vpc_id and subnet_ids belong together",
            "network.cidr is no address block",
            "metadata_service_url: an address that begins with http",
            "alert_emails: one of them is no mail address",
            "bucket_name: 3 to 63 lower-case letters",
            "kms_key_arn: the ARN of a KMS key",
            "job_logs.retention_days: one of CloudWatch's periods",
            "secret_arns: full ARNs of secrets",
            "cpu_disk_mib_per_s: from 125 to 1000",
            "capacity_hours: a whole number from 1 to 24",
        ],
    ),
    (
        {
            "nightly_check": {**VALUES["nightly_check"], **BAD_CHECK},
            "monthly_budget_usd": -1,
        },
        [
            "nightly_check.pool is no key of gpu_pools",
            "nightly_check.profile: quick, standard or deep",
            "nightly_check.schedule: cron(...) with six fields",
            "nightly_check.silent_hours: a whole number from 1 to 168",
            "monthly_budget_usd: more than 0",
        ],
    ),
    (
        {
            "metadata_service_url": None,
            "alert_emails": [],
            "nightly_check": {**VALUES["nightly_check"], "nodes": 3},
        },
        [
            "nightly_check runs on several nodes of Batch, which needs metadata_service",
            "monthly_budget_usd needs alert_emails",
            "nightly_check.nodes is more than the pool's max_nodes",
        ],
    ),
    (
        {"nightly_check": None, "metadata_service": {}},
        [
            "metadata_service creates a service, metadata_service_url names yours",
            "metadata_service: its database needs two zones",
        ],
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changed", "expected"), REFUSED, ids=["pools", "values", "check", "together", "metadata"]
)
def test_an_invalid_variable_is_refused_with_the_valid_values(
    stack: Stack, changed: dict[str, Any], expected: list[str]
) -> None:
    done = stack.run("plan", "-input=false", "-refresh=false", values={**VALUES, **changed})
    assert done.status == 1
    assert [line for line in expected if line not in done.errors] == []


@pytest.mark.nightly
def test_terraform_can_plan_the_example_variables(stack: Stack) -> None:
    example = f"-var-file={STACK / 'terraform.tfvars.example'}"
    done = stack.run("plan", "-input=false", "-refresh=false", example, values={})
    assert done.status == 0, done.errors


# -- what is made ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack_outputs(stack: Stack, planned: Planned) -> dict[str, Any]:
    """The outputs of the applied stack."""
    done = apply(stack)
    if done.status and "AlreadyExists" in done.errors:
        # An answer of moto's did not arrive: the provider has asked again for what was made by then
        requests.post(f"{stack.endpoint}/moto-api/reset", timeout=60).raise_for_status()
        (stack.folder / "terraform.tfstate").unlink()
        done = apply(stack)
    assert done.status == 0, done.errors
    outputs = json.loads(stack.run("output", "-json").stdout)
    return {name: item["value"] for name, item in outputs.items()}


def apply(stack: Stack) -> Done:
    """Apply the stack. moto has no service-linked roles."""
    role = client(stack, "iam").create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    values = {**MADE, "batch_service_role_arn": role}
    return stack.run("apply", "-input=false", "-auto-approve", "-parallelism=30", values=values)


def client(stack: Stack, service: str) -> Any:
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    return boto3.client(service, endpoint_url=stack.endpoint, region_name="us-east-1", **keys)


def test_the_datastore_is_private_and_encrypted(stack: Stack, stack_outputs: dict[str, Any]) -> None:
    bucket = json.loads(stack_outputs["metaflow_config"])["METAFLOW_DATASTORE_SYSROOT_S3"].split("/")[2]
    s3 = client(stack, "s3")
    assert set(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values()) == {True}
    (rule,) = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    rules = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    # Artifacts are shared by runs: only what was deleted, or written over, goes
    assert [item["Expiration"] for item in rules if "Expiration" in item] == [
        {"ExpiredObjectDeleteMarker": True}
    ]
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    (days,) = [item["NoncurrentVersionExpiration"] for item in rules if "NoncurrentVersionExpiration" in item]
    assert days["NoncurrentDays"] == 7
    (statement,) = json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"])["Statement"]
    assert (statement["Effect"], statement["Condition"]) == (
        "Deny",
        {"Bool": {"aws:SecureTransport": "false"}},
    )


def test_the_terraform_output_is_a_metaflow_configuration(
    stack: Stack, stack_outputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(stack_outputs["metaflow_config"])
    assert set(config) <= {f"METAFLOW_{name}" for name in dir(metaflow.metaflow_config)}
    queues = {item["jobQueueName"] for item in client(stack, "batch").describe_job_queues()["jobQueues"]}
    assert config["METAFLOW_BATCH_JOB_QUEUE"] in queues
    roles = {item["Arn"] for item in client(stack, "iam").list_roles()["Roles"]}
    assert config["METAFLOW_ECS_S3_ACCESS_IAM_ROLE"] in roles
    lines = dict(re.findall(r"^export (\w+)='(.*)'$", stack_outputs["metaflow_environment"], re.MULTILINE))
    assert {name: value for name, value in lines.items() if name.startswith("METAFLOW")} == config
    monkeypatch.setenv("FINETUNE_QUEUES", lines["FINETUNE_QUEUES"])
    options = Options.from_values({})
    for gpu, pool in (("A100 SXM 40GB", "a100"), ("A10G", "a10g")):
        assert options.queue_for(gpu) == stack_outputs["queues"][pool]["any_nodes"] in queues


def test_the_maximum_cost_matches_the_price_table(stack_outputs: dict[str, Any]) -> None:
    prices = {item.name: item.usd_per_hour for item in hardware.current().instances if item.cloud == "aws"}
    expected = sum(
        pool["max_nodes"] * (prices[pool["instance_type"]] or 0) for pool in VALUES["gpu_pools"].values()
    )
    assert stack_outputs["most_usd_per_hour"] == pytest.approx(expected)


def test_a_nightly_job_launches_the_checklist_on_the_queue_of_the_pool(
    stack: Stack, stack_outputs: dict[str, Any]
) -> None:
    schedule = client(stack, "scheduler").get_schedule(Name="finetune-nightly-check")
    assert schedule["ScheduleExpression"] == "cron(0 3 * * ? *)"
    assert schedule["Target"]["Arn"] == "arn:aws:scheduler:::aws-sdk:batch:submitJob"
    requirements = json.loads(schedule["Target"]["Input"])
    batch = client(stack, "batch")
    definitions = batch.describe_job_definitions(jobDefinitionName="finetune-nightly-check")["jobDefinitions"]
    definition = max(definitions, key=lambda each: int(each["revision"]))  # a request may be sent again
    assert definition["jobDefinitionArn"].startswith(requirements["JobDefinition"])
    (queue,) = batch.describe_job_queues(jobQueues=[requirements["JobQueue"]])["jobQueues"]
    assert queue["jobQueueName"] == "finetune-cpu"
    container = definition["containerProperties"]
    python, flow, *arguments = container["command"]
    assert (python, flow, arguments[:1]) == ("python", "flows/checklist_flow.py", ["run"])
    assert arguments[arguments.index("--queue") + 1] == stack_outputs["queues"]["a100"]["any_nodes"]
    variables = {item["name"]: item["value"] for item in container["environment"]}
    assert variables["METAFLOW_SERVICE_URL"] == VALUES["metadata_service_url"]
    _check_options(arguments)


def test_a_night_without_a_check_raises_an_alarm(stack: Stack, stack_outputs: dict[str, Any]) -> None:
    (alarm,) = client(stack, "cloudwatch").describe_alarms()["MetricAlarms"]
    (topic,) = client(stack, "sns").list_topics()["Topics"]
    assert alarm["AlarmActions"] == [topic["TopicArn"]]
    assert (alarm["EvaluationPeriods"], alarm["TreatMissingData"]) == (36, "breaching")
    queries = {query["Id"]: query for query in alarm["Metrics"]}
    counted = queries["matched"]["MetricStat"]
    assert (counted["Metric"]["MetricName"], counted["Period"]) == ("MatchedEvents", 3600)
    (named,) = counted["Metric"]["Dimensions"]
    rule = client(stack, "events").describe_rule(Name=named["Value"])
    assert json.loads(rule["EventPattern"])["detail"] == {
        "status": ["SUCCEEDED", "FAILED"],
        "jobName": ["finetune-nightly-check"],
    }
    policy = client(stack, "sns").get_topic_attributes(TopicArn=topic["TopicArn"])["Attributes"]["Policy"]
    (statement,) = json.loads(policy)["Statement"]
    assert set(statement["Principal"]["Service"]) == {"cloudwatch.amazonaws.com", "events.amazonaws.com"}
    assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


def _check_options(arguments: list[str]) -> None:
    """Check that the command line of the flow has all of these options."""
    accepted_options = {f"--{name.replace('_', '-')}" for name in DEFAULTS} | OF_METAFLOW.keys()
    assert {word for word in arguments if word.startswith("--")} <= accepted_options


def test_roles_have_only_the_rights_that_they_need(stack: Stack, stack_outputs: dict[str, Any]) -> None:
    iam = client(stack, "iam")
    versions = [
        iam.get_policy_version(PolicyArn=arn, VersionId="v1") for arn in stack_outputs["launcher_policies"]
    ]
    allowed = [
        (action, statement)
        for version in versions
        for statement in version["PolicyVersion"]["Document"]["Statement"]
        for action in _listed(statement["Action"])
    ]
    everything = [action for action, statement in allowed if "*" in _listed(statement["Resource"])]
    assert all(re.match(r"\w+:(Describe|List|Get)", action) for action in everything), everything
    conditions = {action: statement.get("Condition") for action, statement in allowed}
    assert not any("*" in action for action in conditions)
    needed = {"batch:SubmitJob", "batch:RegisterJobDefinition", "batch:TerminateJob", "iam:PassRole"}
    assert needed <= set(conditions)
    assert conditions["batch:RegisterJobDefinition"] == {"BoolIfExists": {"batch:Privileged": "false"}}
    registering = [
        arn.rpartition("/")[2]
        for arn, version in zip(stack_outputs["launcher_policies"], versions, strict=True)
        if "batch:RegisterJobDefinition" in json.dumps(version["PolicyVersion"]["Document"])
    ]
    assert registering == ["finetune-definitions"]
    condition = {"StringEquals": {"aws:ResourceTag/Project": "finetune"}}
    assert conditions["batch:TerminateJob"] == condition  # which Metaflow gives all jobs:
    assert json.loads(json.loads(stack_outputs["metaflow_config"])["METAFLOW_BATCH_DEFAULT_TAGS"]) == {
        "Project": "finetune"
    }
    (job,) = [role for role in iam.list_roles()["Roles"] if role["RoleName"].startswith("finetune-job-")]
    assert job["AssumeRolePolicyDocument"]["Statement"][0]["Principal"] == {
        "Service": "ecs-tasks.amazonaws.com"
    }
    attached = iam.list_attached_role_policies(RoleName=job["RoleName"])["AttachedPolicies"]
    assert {item["PolicyName"] for item in attached} == {"finetune-datastore", "finetune-secrets"}
    readable = [statement["Resource"] for action, statement in allowed if action == "logs:GetLogEvents"]
    assert readable == ["arn:aws:logs:us-east-1:123456789012:log-group:/aws/batch/job:*"]


@pytest.mark.nightly
def test_launchers_can_work_without_the_right_to_register_job_definitions(stack: Stack) -> None:
    numbers = []
    for register in (True, False):
        values = {**VALUES, "launchers_register_definitions": register}
        assert stack.run("plan", "-input=false", "-out=rights", values=values).status == 0
        shown = json.loads(stack.run("show", "-json", "rights").stdout)
        change = shown["output_changes"]["launcher_policies"]
        numbers.append(len(change.get("after") or change["after_unknown"]))  # ARNs are known after apply only
    assert numbers == [3, 2]


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
