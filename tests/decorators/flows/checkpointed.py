"""A flow whose script writes checkpoints, fails once, and resumes from them in the retry."""

from __future__ import annotations

import time

from metaflow import FlowSpec, current, current_profile, gpu_profile, retry, step


def train(attempt):
    folder = current_profile().checkpoint_dir
    first = max((int(path.name) for path in folder.iterdir()), default=0) + 1
    print(f"begins at step {first}", flush=True)
    for number in range(first, 4):
        (folder / str(number)).write_text("weights")
        if number == 2 and attempt == 0:
            time.sleep(12)  # until the folder has been stored
            raise ValueError("fails once")


class CheckpointedFlow(FlowSpec):
    @retry(times=1, minutes_between_retries=0)
    @gpu_profile
    @step
    def start(self):
        current.gpu_profile.torchrun(train, [current.retry_count], processes_per_node=1)
        self.names = sorted(path.name for path in current.gpu_profile.checkpoint_dir.iterdir())
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    CheckpointedFlow()
