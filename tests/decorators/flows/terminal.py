"""A flow with one task that prints the output of a training run."""

from __future__ import annotations

from metaflow import Config, FlowSpec, step

from decorators._metaflow import main


class TerminalFlow(FlowSpec):
    settings = Config("settings", default_value="{}")  # which Metaflow reads before all else

    @step
    def start(self):
        for number in range(1, 31):
            print(f"step {number}/30  loss 2.5000  1,333 tok/s  eta 0:01  0.5 GiB  lr 1.00e-05", flush=True)
            if number == 20:
                print("checkpoint after step 20", flush=True)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    main(TerminalFlow)
