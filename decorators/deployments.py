"""What a deployment can't express is said before anything is planned, compiled or asked of a cloud."""

from __future__ import annotations

from decorators._metaflow import FinetuneError, StepView, deployer
from estimator.plan import Plan

_SINGLE = {"step-functions": "Step Functions", "airflow": "Airflow"}  # that Metaflow compiles no gang for


def check_deployable(step: StepView) -> None:
    """Raise FinetuneError where the flow's scheduler has no ``@parallel``, or AWS is to be asked nowhere."""
    name = deployer()
    gangs = [other.name for other in step.steps() if other.has("parallel")]
    if name in _SINGLE and gangs:
        raise FinetuneError(
            f"{_SINGLE[name]} can't run step {gangs[0]}: Metaflow has no @parallel there.",
            "Deploy to Argo Workflows (argo-workflows create), or deploy a flow for one node: "
            "flows/finetune_linear_flow.py; for the checklist, see docs/checklist.md.",
        )
    if name == "step-functions" and not _has_region():
        raise FinetuneError(
            "Step Functions and AWS Batch need an AWS region, and none is configured here.",
            "Set AWS_DEFAULT_REGION, or a region in the profile: aws configure set region us-east-1.",
        )


def _has_region() -> bool:
    """Whether boto3 finds one; yes where boto3 is missing, which Metaflow names itself."""
    try:
        import boto3
    except ImportError:
        return True
    return bool(boto3.session.Session().region_name)


def check_nodes(step: StepView, plan: Plan) -> None:
    """Raise FinetuneError where the plan has more nodes than the flow has a step for."""
    if plan.request.nodes > 1 and not any(other.has("parallel") for other in step.steps()):
        raise FinetuneError(
            f"The plan is for {plan.request.nodes} nodes, and no step of this flow is @parallel.",
            "Ask for one node (--nodes 1), or use a flow with such a step, as flows/finetune_flow.py.",
        )
