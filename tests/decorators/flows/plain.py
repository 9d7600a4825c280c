"""A flow without plans."""

from __future__ import annotations

import time

from metaflow import FlowSpec, step


class PlainFlow(FlowSpec):
    @step
    def start(self):
        from decorators.gpu_profile import current_plan, current_profile

        time.sleep(0.3)
        self.plan = current_plan()
        self.measured = current_profile().measured()
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    PlainFlow()
