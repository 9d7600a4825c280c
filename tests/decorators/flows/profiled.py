"""A flow of three steps that asks for a plan; what arrives in its tasks goes into artifacts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from metaflow import FlowSpec, Parameter, step
from plans import make_plan

from decorators.gpu_profile import current_plan, current_profile, gpu_profile
from estimator.errors import UserError
from launchers.telemetry import Memory, Step


def counted(parameters, backend):
    """Leave a mark for each time a plan is made."""
    if "COUNT_PLANS" in os.environ:
        with Path(os.environ["COUNT_PLANS"]).open("a") as file:
            file.write(f"{os.getpid()} {backend}\n")
    return make_plan(parameters, backend)


class ProfiledFlow(FlowSpec):
    model = Parameter("model", default="tiny-llama")
    gpus = Parameter("gpus", type=int, default=0)
    seconds = Parameter("seconds", default=0.1)
    fail = Parameter("fail", default="")

    @gpu_profile(plan=counted, request="none")
    @step
    def start(self):
        self.plan = current_plan()
        if self.fail == "start":
            raise UserError("Line 7 of the dataset is broken.", "Mend it: *.jsonl takes one object a line.")
        self.next(self.train)

    @gpu_profile(plan=counted, interval=0.1)
    @step
    def train(self):
        self.plan = current_plan()
        profile = current_profile()
        profile.expect(total_steps=3)
        for number in range(1, 4):
            profile.add(
                Step(
                    rank=0,
                    step=number,
                    loss=3.0 - number / 2,
                    lr=1e-3,
                    grad_norm=1.0,
                    samples=2,
                    tokens=100,
                    dt=0.5,
                    dtf=0.2,
                    dtb=0.3,
                )
            )
            memory = Memory(
                rank=0,
                step=number,
                allocated_peak=None,
                reserved_peak=None,
                rss=400 << 20,
                rss_peak=500 << 20,
            )
            profile.add(memory)
        time.sleep(float(self.seconds))
        if self.fail == "train":
            raise ValueError("the loss is not a number")
        self.measured = profile.measured()
        self.next(self.end)

    @step
    def end(self):
        print("plan in end:", current_plan().model if current_plan() else None)


if __name__ == "__main__":
    ProfiledFlow()
