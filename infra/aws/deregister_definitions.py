"""Deregister Metaflow's AWS Batch job definitions that nothing uses.

Metaflow registers a definition per image, number of nodes and size of shared memory, and removes none.
Definitions of unfinished jobs and of Step Functions state machines are kept. Metaflow registers a definition
again when a run needs it, unless launchers may not (``launchers_register_definitions = false``).

    python infra/aws/deregister_definitions.py --dry-run
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import boto3

_METAFLOWS = re.compile(
    r"job-definition/metaflow_[0-9a-zA-Z]+:\d+$"
)  # batch_client.py of Metaflow names them
_UNFINISHED = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
_DESCRIBED_AT_ONCE = 100  # DescribeJobs


def unused_definitions(batch: Any, step_functions: Any) -> list[str]:
    """Return the ARNs of Metaflow's active definitions that neither jobs nor state machines refer to."""
    active = {
        item["jobDefinitionArn"]
        for page in batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE")
        for item in page["jobDefinitions"]
    }
    used = _of_jobs(batch) | _of_state_machines(step_functions)
    return sorted(arn for arn in active if _METAFLOWS.search(arn) and not used & {arn, arn.rsplit(":", 1)[0]})


def _of_jobs(batch: Any) -> set[str]:
    """Return the definitions of all jobs that have not ended."""
    jobs = [
        job["jobId"]
        for queues in batch.get_paginator("describe_job_queues").paginate()
        for queue in queues["jobQueues"]
        for status in _UNFINISHED
        for page in batch.get_paginator("list_jobs").paginate(
            jobQueue=queue["jobQueueName"], jobStatus=status
        )
        for job in page["jobSummaryList"]
    ]
    return {
        job["jobDefinition"]
        for start in range(0, len(jobs), _DESCRIBED_AT_ONCE)
        for job in batch.describe_jobs(jobs=jobs[start : start + _DESCRIBED_AT_ONCE])["jobs"]
    }


def _of_state_machines(step_functions: Any) -> set[str]:
    """Return the definitions that state machines name, with and without a revision."""
    return {
        arn
        for page in step_functions.get_paginator("list_state_machines").paginate()
        for machine in page["stateMachines"]
        for arn in re.findall(
            r"arn:[\w-]+:batch:[\w-]+:\d+:job-definition/[\w-]+(?::\d+)?",
            step_functions.describe_state_machine(stateMachineArn=machine["stateMachineArn"])["definition"],
        )
    }


def main() -> None:
    """Deregister them, and print each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="Print them only.")
    dry_run = parser.parse_args().dry_run
    batch = boto3.client("batch")
    arns = unused_definitions(batch, boto3.client("stepfunctions"))
    for arn in arns:
        if not dry_run:
            batch.deregister_job_definition(jobDefinition=arn)
        print(arn)
    print(f"{len(arns)} job definitions {'are unused' if dry_run else 'deregistered'}")


if __name__ == "__main__":
    main()
