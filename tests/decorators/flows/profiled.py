"""A flow of three steps with a plan; values received by its tasks are stored as artifacts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from metaflow import FlowSpec, Parameter, step
from plans import make_plan
from synthetic import events

from decorators._metaflow import command, main, resumed_artifact
from decorators.gpu_profile import current_plan, current_profile, gpu_profile
from decorators.storage import origin_run_ids
from estimator.errors import UserError


def counted(parameters, backend):
    """Record each call that makes a plan, with the model in the plan of the resumed run."""
    if "COUNT_PLANS" in os.environ:
        earlier = resumed_artifact("start", "plan") if command() == "resume" else None
        with Path(os.environ["COUNT_PLANS"]).open("a") as file:
            file.write(f"{os.getpid()} {backend} {earlier.model if earlier else 'none'}\n")
    return make_plan(parameters, backend)


class ProfiledFlow(FlowSpec):
    model = Parameter("model", default="tiny-llama")
    gpus = Parameter("gpus", type=int, default=0)
    steps = Parameter("steps", default=3)
    of_steps = Parameter("of-steps", default=3)
    seconds = Parameter("seconds", default=0.1)
    until = Parameter("until", default="")
    fail = Parameter("fail", default="")
    pending_timeout = Parameter("pending-timeout", type=float, default=30.0)

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
        print("origins:", *origin_run_ids())
        print("began at", time.time())
        profile = current_profile()
        profile.expect(total_steps=self.of_steps)
        ranks = self.plan.layout.processes_per_node
        for event in events(steps=self.steps, ranks=ranks, on_gpus=self.plan.layout.device == "cuda"):
            profile.add(event)
        time.sleep(float(self.seconds))
        while self.until and not Path(self.until).exists():
            time.sleep(0.05)
        if self.fail == "train":
            raise ValueError("the loss is not a number")
        self.measured = profile.measured()
        print("work ended at", time.time())
        self.next(self.end)

    @step
    def end(self):
        print("plan in end:", current_plan().model if current_plan() else None)


if __name__ == "__main__":
    main(ProfiledFlow)
