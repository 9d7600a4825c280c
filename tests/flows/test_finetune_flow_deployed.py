"""Requests of deployed finetune_flow.py and finetune_linear_flow.py, field by field."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from decorators.packed_plan import unpack
from estimator.plan import MIB, Plan
from tests.decorators.conftest import Home
from tests.decorators.test_gpu_profile_deployed import ROLE, _client, _make_queue, compiled, templates
from tests.decorators.test_storage import s3 as s3
from tests.flows.argo_retries import HOUR, MINUTE, SUCCEEDED, Ending, replay

pytest.importorskip("kubernetes", reason="needs the kubernetes package to compile for a cluster")
models = pytest.importorskip("hera.workflows.models", reason="needs hera: its models are Argo's schema")

pytestmark = pytest.mark.slow
FLOWS = Path(__file__).parents[2] / "flows"
SFN = {
    "METAFLOW_SFN_IAM_ROLE": ROLE,
    "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": ROLE,
    "METAFLOW_EVENTS_SFN_ACCESS_IAM_ROLE": ROLE,
    "METAFLOW_BATCH_JOB_QUEUE": "gpu-queue",
}
# model, GPU -> nodes, instance type, cores that the plan asks for, EFA interfaces of each node
ARGO = {  # a whole machine; two machines with EFA
    ("llama-8b", "h100-sxm"): (1, "p5.48xlarge", 34, 0),
    ("mixtral-8x7b", "a100-80gb"): (2, "p4de.24xlarge", 34, 4),
}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / ".metaflow").mkdir()
    return Home(tmp_path)


@pytest.fixture(scope="module")
def queue(s3: str) -> str:
    """A local S3 that also serves Batch, with the queue to which the flow is deployed."""
    _make_queue(s3)
    return s3


def settings(model: str, gpu: str, **overrides: object) -> tuple[str, ...]:
    engine = "deepspeed" if model.startswith("mixtral") else "torchtune"
    values = {"model": model, "engine": engine, "resources": {"gpu": gpu, "cloud": "aws", **overrides}}
    return ("--config-value", "settings", json.dumps(values))


def jobset_of(template: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet of a multi-node step; Argo expressions in it are numbers of nodes."""
    text = re.sub(r"\{\{[^}]*\}\}", "1", template["resource"]["manifest"])
    workflow: dict[str, Any] = yaml.safe_load(text)
    return workflow


def check_pod(pod: dict[str, Any], plan: Plan, cores: int, efa: int, provider: str | None) -> None:
    """Check all requests of a training pod."""
    container = pod["containers"][0]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    request = plan.request
    assert limits["nvidia.com/gpu"] == str(request.gpus_per_node)
    assert limits.get("vpc.amazonaws.com/efa") == (str(efa) if efa else None)
    assert float(requests["cpu"]) == cores
    assert requests["memory"].endswith("M")
    assert 0.8 < float(requests["memory"][:-1]) * 1e6 / (request.memory_mib * MIB) <= 1.0001
    assert float(requests["ephemeral-storage"][:-1]) * 1e6 >= request.disk_mib * MIB
    assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == request.instance_type
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    memory = next(volume for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory")
    assert memory["emptyDir"]["sizeLimit"] == f"{request.shared_memory_mib}Mi"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert unpack(variables["FINETUNE_PLAN"]) == plan
    assert variables.get("FI_PROVIDER") == provider


def lost(after_s: float, **environment: str) -> Ending:
    """Return a pod taken away by the cluster: evicted, on a reclaimed spot machine, on a lost node."""
    return Ending(after_s=after_s, **environment)


FAILED = Ending(after_s=10 * MINUTE, exit_code="1", message="Error (exit code 1)")
LATE = Ending(after_s=5 * HOUR, exit_code="1")
USER_ERROR_STATUS = Ending(after_s=MINUTE, exit_code="202", message="Error (exit code 202)")
RECLAIMS = [
    lost(9 * HOUR, exit_code="137"),
    lost(30 * HOUR, status="Error", message="pod deleted"),
    lost(2 * HOUR, exit_code="143"),
]


def check_retries(steps: dict[str, dict[str, Any]]) -> None:
    """Check retries of compiled steps after failures and disruptions."""
    tasks = {name: step for name, step in steps.items() if "container" in step or "resource" in step}
    tasks.pop("error-msg-capture-hook")  # Metaflow's own, after the end
    assert {"start", "prepare", "train", "train-nodes", "evaluate", "export", "gather", "end"} <= set(tasks)
    for step in tasks.values():
        assert replay(step, [lost(HOUR), SUCCEEDED]).status == "Succeeded", step["name"]
        retried = replay(step, [*RECLAIMS, SUCCEEDED])
        assert (retried.status, retried.attempts) == ("Succeeded", 4)
        assert retried.waits_s == (2 * MINUTE, 4 * MINUTE, 8 * MINUTE)
        endless = replay(step, [lost(HOUR)] * 9)
        assert endless.attempts == 5, "Metaflow has no more"
    for step in (tasks["train"], tasks["encode"]):
        assert replay(step, [FAILED, SUCCEEDED]).status == "Succeeded"
        assert replay(step, [LATE, LATE, SUCCEEDED]).status == "Succeeded"
        assert replay(step, [USER_ERROR_STATUS]).attempts == 1
    for step in (tasks["prepare"], tasks["export"]):  # no @retry in the flow
        assert replay(step, [FAILED]).attempts == 1
        assert replay(step, [USER_ERROR_STATUS]).attempts == 1
    check_jobset_retries(tasks["train-nodes"])


def check_jobset_retries(step: dict[str, Any]) -> None:
    """Check that a user error reaches Argo by the JobSet reason and that older JobSets are removed."""
    jobset = jobset_of(step)["spec"]
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    for job in jobset["replicatedJobs"]:
        (of_pod,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
        assert of_pod["onExitCodes"]["values"] == [202]
        pod = job["template"]["spec"]["template"]["spec"]
        assert job["template"]["spec"]["activeDeadlineSeconds"] == pod["activeDeadlineSeconds"] + 30 * MINUTE
    conditions = step["resource"]["failureCondition"].split(", ")
    assert conditions[-1] == "status.terminalState == Failed"
    assert sorted(conditions) == conditions, "Argo's executor looks at them in the order of their keys"
    ended = Ending(
        after_s=HOUR, exit_code="1", message=f"failure condition '{conditions[-1]}' evaluated true"
    )
    mistake = Ending(
        after_s=HOUR, exit_code="1", message=f"failure condition '{conditions[1]}' evaluated true"
    )
    assert replay(step, [ended, ended, SUCCEEDED]).status == "Succeeded"
    assert replay(step, [mistake]).attempts == 1
    (init,) = step["initContainers"]
    assert init["args"][0] == "{{inputs.parameters.retryCount}}"
    name, value = init["args"][1].split("=")
    assert jobset_of(step)["metadata"]["labels"][name]
    assert value == "{{inputs.parameters.task-id-entropy}}"
    assert step["resource"]["setOwnerReference"] is True


@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        # the same flow and checks without a network between nodes
        pytest.param(*each, marks=pytest.mark.nightly if nodes == 1 else ())
        for each, (nodes, *_) in ARGO.items()
    ],
)
def test_on_argo_the_training_step_requests_the_plan(home: Home, s3: str, model: str, gpu: str) -> None:
    nodes, instance, cores, efa = ARGO[model, gpu]
    asked_for = settings(model, gpu, gpus=8, priority_class="research")
    arguments = (*asked_for, "argo-workflows", "--name", "ft", "create", "--only-json")
    workflow, text = compiled(home, s3, str(FLOWS / "finetune_flow.py"), *arguments)
    assert "Traceback" not in text
    assert text.count("will not be recorded") == 1
    models.WorkflowTemplate.model_validate(workflow)
    assert workflow["spec"]["ttlStrategy"] == {"secondsAfterCompletion": 7 * 86400}
    assert workflow["spec"]["podGC"] == {"strategy": "OnPodSuccess"}
    steps = templates(workflow)
    check_retries(steps)
    variables = steps["start"]["container"]["env"]
    plan = unpack(next(v["value"] for v in variables if v["name"] == "FINETUNE_PLAN"))
    assert (plan.request.nodes, plan.request.instance_type) == (nodes, instance)

    for job in jobset_of(steps["train-nodes"])["spec"]["replicatedJobs"]:
        pod_spec = job["template"]["spec"]["template"]["spec"]
        check_pod(pod_spec, plan, cores, efa, "efa" if efa else None)
        assert pod_spec["priorityClassName"] == "research"
        assert pod_spec["activeDeadlineSeconds"] > 0  # by which quotas count it as Terminating
    alone = steps["train"]
    pod = {**alone, "containers": [alone["container"]], "volumes": alone["volumes"]}
    check_pod(pod, plan, cores, efa, None)  # one node needs no variables of a fabric
    for name in ("start", "prepare", "train", "gather", "export"):
        assert json.loads(steps[name]["podSpecPatch"])["priorityClassName"] == "research"
        assert steps[name]["activeDeadlineSeconds"] > 0
    for name in ("start", "prepare", "gather", "export"):
        resources = steps[name]["container"]["resources"]
        assert "nvidia.com/gpu" not in resources.get("limits", {})


def test_on_step_functions_every_field_of_the_training_step_matches_the_plan(home: Home, queue: str) -> None:
    deploy_arguments = settings("mixtral-8x7b", "h200")
    arguments = (*deploy_arguments, "step-functions", "--name", "ft", "create", "--only-json")
    machine, _ = compiled(home, queue, str(FLOWS / "finetune_linear_flow.py"), *arguments, **SFN)
    for state in machine["States"].values():
        check_batch_retries(state)
        overrides = state["Parameters"]["ContainerOverrides"]
        assert len(json.dumps(overrides)) < 4000, "AWS Batch takes 8192 characters"
    parameters = machine["States"]["train"]["Parameters"]
    plan = unpack(variable_of_script(queue, parameters["ContainerOverrides"]["Command"], "FINETUNE_PLAN"))
    cores = 34
    assert (plan.engine, plan.request.nodes, plan.request.cpu) == ("deepspeed", 1, cores)
    requirements = {
        item["Type"]: item["Value"] for item in parameters["ContainerOverrides"]["ResourceRequirements"]
    }
    assert requirements == {"GPU": "8", "VCPU": str(cores), "MEMORY": str(plan.request.memory_mib)}
    assert "gpu-queue" in parameters["JobQueue"]


def variable_of_script(address: str, command: list[str], name: str) -> str:
    """Return a variable set by the script that the command of a job fetches from S3."""
    bucket, key = re.findall(r'download_file\("([^"]+)", "([^"]+)"', command[-1])[0]
    script = _client("s3", address).get_object(Bucket=bucket, Key=key)["Body"].read().decode()
    exports = "".join(re.findall(r"export \w+=\$\(echo [^)]*\) && ", script))
    shown = f'{exports}printf %s "${name}"'
    return subprocess.run(["bash", "-c", shown], check=True, capture_output=True, text=True).stdout


def check_batch_retries(state: dict[str, Any]) -> None:
    """Check what AWS Batch does after a lost machine, a failure and a user error."""
    strategy = state["Parameters"]["RetryStrategy"]
    spot = {"StatusReason": "Host EC2 (instance i-0a1b) terminated.", "Reason": "", "ExitCode": ""}
    failed = {"StatusReason": "Essential container in task exited", "Reason": "", "ExitCode": "1"}
    assert strategy["Attempts"] == 5
    assert batch_action(strategy, spot) == "RETRY"
    assert batch_action(strategy, failed | {"ExitCode": "202"}) == "EXIT"
    retried = state["Parameters"]["Parameters"]["step_name"] == "train"  # it alone has @retry in this flow
    assert batch_action(strategy, failed) == ("RETRY" if retried else "EXIT")


def batch_action(strategy: dict[str, Any], ended: dict[str, str]) -> str:
    """The first rule of ``evaluateOnExit`` whose every condition matches, as AWS Batch documents it."""
    for rule in strategy["EvaluateOnExit"]:
        conditions = {name.removeprefix("On"): glob for name, glob in rule.items() if name != "Action"}
        if all(fnmatchcase(ended[name].lower(), glob.lower()) for name, glob in conditions.items()):
            return str(rule["Action"])
    return "RETRY"


SFN_CREATE, AIRFLOW = ("step-functions", "create"), ("airflow", "create", "dag.py")
ARGO_CREATE, ON_BATCH = ("argo-workflows", "create"), ("run", "--nodes", "1", "--with", "batch")
THERE, NOWHERE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, {"AWS_CONFIG_FILE": "/none", **SFN}


@pytest.mark.parametrize(
    ("flow", "fragments", "variables", "expected"),
    [
        ("finetune_flow", SFN_CREATE, THERE, ("train_nodes", "@parallel", "argo-workflows create")),
        ("finetune_linear_flow", AIRFLOW, THERE, ("Airflow", "argo-workflows create")),
        ("finetune_linear_flow", SFN_CREATE, NOWHERE, ("region", "AWS_DEFAULT_REGION")),
        ("checklist_flow", SFN_CREATE, THERE, ("check_nodes", "@parallel")),
        ("checklist_flow", ARGO_CREATE, {"KUBECONFIG": "/none"}, ("no kubeconfig at /none", "KUBECONFIG")),
        ("checklist_flow", ON_BATCH, THERE, ("AWS cannot be queried", "AWS_DEFAULT_REGION")),
    ],
)
def test_an_impossible_deployment_is_refused_before_anything_is_submitted(
    home: Home, flow: str, fragments: tuple[str, ...], variables: dict[str, str], expected: tuple[str, ...]
) -> None:
    s3 = {"METAFLOW_DEFAULT_DATASTORE": "s3", "METAFLOW_DATASTORE_SYSROOT_S3": "s3://nobody/there"}
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    done = home.python(str(FLOWS / f"{flow}.py"), *fragments, **s3, **keys, **variables)
    assert done.returncode == 2
    assert [word for word in expected if word not in done.stdout + done.stderr] == []
    assert "Traceback" not in done.stdout + done.stderr


def test_a_flow_for_one_node_refuses_a_plan_for_two(home: Home) -> None:
    done = home.python(str(FLOWS / "finetune_linear_flow.py"), "run", "--nodes", "2")
    assert done.returncode == 2
    assert "no step of this flow is @parallel." in done.stdout + done.stderr
