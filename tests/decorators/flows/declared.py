"""A flow whose training step names its job in the decorator and reports its steps."""

from __future__ import annotations

from metaflow import FlowSpec, Parameter, current, gpu_profile, step


class DeclaredFlow(FlowSpec):
    model = Parameter("model", default="tiny-llama")
    length = Parameter("length", default=128)

    @step
    def start(self):
        self.next(self.train)

    @gpu_profile(model="{model}", method="lora", seq_len="{length}", global_batch_size=8)
    @step
    def train(self):
        self.plan = current.gpu_profile.plan
        for number in (1, 2, 3):
            current.gpu_profile.report(step=number, loss=3.0 / number, tokens=1024, seconds=0.5)
        self.measured = current.gpu_profile.measured()
        self.next(self.again)

    @gpu_profile(model="tiny-llama", seq_len=256)
    @step
    def again(self):
        self.plan = current.gpu_profile.plan
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    DeclaredFlow()
