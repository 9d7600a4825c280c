"""A flow that runs a script of the user on two nodes, or a function on one."""

from __future__ import annotations

from pathlib import Path

from metaflow import FlowSpec, Parameter, current, gpu_profile, parallel, step


def work(word, *, times=1):
    print(word * times, flush=True)


class ScriptedFlow(FlowSpec):
    fails = Parameter("fails", default="none")

    @step
    def start(self):
        self.next(self.alone)

    @gpu_profile
    @step
    def alone(self):
        current.gpu_profile.torchrun(work, ["spam"], {"times": 2}, processes_per_node=2)
        self.next(self.train, num_parallel=2)

    @gpu_profile
    @parallel
    @step
    def train(self):
        script = Path(__file__).with_name("script.py")
        current.gpu_profile.torchrun(script, [self.fails], processes_per_node=1)
        self.node = current.parallel.node_index
        self.measured = current.gpu_profile.measured()
        self.next(self.gather)

    @step
    def gather(self, inputs):
        nodes = sorted(inputs, key=lambda task: task.node)
        self.steps = [task.measured.steps for task in nodes]
        self.ranks = [[rank.rank for rank in task.measured.ranks] for task in nodes]
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    ScriptedFlow()
