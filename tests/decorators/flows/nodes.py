"""A flow whose training step has two nodes; a node can fail, or wait to be killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from metaflow import FlowSpec, Parameter, current, parallel, resources, step
from plans import make_plan

from decorators.gpu_profile import current_plan, current_profile, gpu_profile
from estimator.errors import UserError


def wait_for_samples(node):
    """Wait until the profiler of each node has sampled while both hold their memory."""
    wait_for_peer("holds", node)
    before = current_profile().measured().samples
    while current_profile().measured().samples < before + 2:
        time.sleep(0.05)
    wait_for_peer("sampled", node)


def wait_for_peer(name, node):
    Path(f"{name}-{node}").touch()
    while not Path(f"{name}-{1 - node}").exists():
        time.sleep(0.05)


class NodesFlow(FlowSpec):
    model = Parameter("model", default="tiny-llama")
    gpus = Parameter("gpus", type=int, default=0)
    nodes = Parameter("nodes", type=int, default=2)
    failing_node = Parameter("failing-node", type=int, default=-1)
    seconds = Parameter("seconds", default=0.3)
    until_sampled = Parameter("until-sampled", type=bool, default=False)

    @gpu_profile(plan=make_plan, request="none")
    @step
    def start(self):
        self.next(self.train, num_parallel=2)

    @gpu_profile(plan=make_plan, interval=0.1)
    @parallel
    @step
    def train(self):
        node = current.parallel.node_index
        Path(f"node-{node}.pid").write_text(str(os.getpid()))
        self.plan = current_plan()
        if node == self.failing_node:
            raise UserError(f"Node {node} has no disk space.", "Free some.")
        ballast = bytearray(os.urandom(1 << 20) * 150) if node == 1 else None
        time.sleep(float(self.seconds))
        if self.until_sampled:
            wait_for_samples(node)
        del ballast
        self.measured = current_profile().measured()
        self.next(self.gather)

    @gpu_profile(plan=make_plan, request="evaluate")
    @resources(memory=5000)
    @step
    def gather(self, inputs):
        self.measured = sorted((node.measured for node in inputs), key=lambda measured: measured.node)
        self.plans = [node.plan for node in inputs]
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    NodesFlow()
