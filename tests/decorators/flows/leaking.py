"""A flow whose steps fail with exceptions that contain secrets of the environment."""

from __future__ import annotations

import os

from metaflow import FlowSpec, Parameter, catch, step

from decorators.gpu_profile import gpu_profile


class RefusedError(Exception):
    """Exception whose text is not among its arguments."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __str__(self) -> str:
        return f"refused: {' '.join(os.environ[name] for name in self.names)}"


class LeakingFlow(FlowSpec):
    names = Parameter("names", default="")
    caught = Parameter("caught", default=False)

    @catch(var="error")
    @step
    def start(self):
        if self.caught:
            raise RefusedError(self.names.split(","))
        self.next(self.train)

    @gpu_profile()
    @step
    def train(self):
        try:
            raise RefusedError(self.names.split(","))
        except RefusedError as error:
            raise RuntimeError(f"no upload: {error}") from error
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    LeakingFlow()
