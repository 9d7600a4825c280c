"""A flow with one multi-node step on AWS Batch that a test controls; other steps run on the client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from metaflow import FlowSpec, Parameter, batch, current, parallel, retry, step

from decorators._metaflow import Backend
from decorators.node_request import NodeRequest, node_request
from estimator.plan import Request

MEMORY_MIB = 768


def request_of_step(parameters: Mapping[str, Any], backend: Backend, gpus: int | None) -> NodeRequest:
    """Request small containers, so that a memory limit is reached quickly."""
    request = Request(
        nodes=parameters["nodes"],
        gpus_per_node=0,
        gpu_type=None,
        cpu=1,
        memory_mib=MEMORY_MIB,
        shared_memory_mib=64,
        disk_mib=64,
    )
    return NodeRequest(request=request, launch="")


class SmallFlow(FlowSpec):
    """``--does``: "grow" beyond the memory in the first attempt, "wait" for ever, or nothing of the kind."""

    does = Parameter("does", default="")
    nodes = Parameter("nodes", default=2, type=int)

    @step
    def start(self) -> None:
        self.next(self.work, num_parallel=self.nodes)

    @retry(times=1, minutes_between_retries=0)
    @node_request(decide=request_of_step)
    @batch
    @parallel
    @step
    def work(self) -> None:
        self.attempt = current.retry_count
        print(f"node {current.parallel.node_index} of {current.parallel.num_nodes} works", flush=True)
        if self.does == "grow" and self.attempt == 0 and current.parallel.node_index == 0:
            self.never = bytes(bytearray(2 * MEMORY_MIB * 2**20))
        if self.does == "wait":
            time.sleep(3600)
        self.node = current.parallel.node_index
        self.next(self.join)

    @step
    def join(self, inputs: Any) -> None:
        self.seen = sorted((task.node, task.attempt) for task in inputs)
        self.next(self.end)

    @step
    def end(self) -> None:
        print(self.seen)


if __name__ == "__main__":
    SmallFlow()
