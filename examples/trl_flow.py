# TRL's SFTTrainer on two nodes, with the arguments of the plan
# python examples/trl_flow.py run --model MODEL --data texts.jsonl
"""TRL on two nodes: the plan holds the arguments, checkpoints outlast a retry, the card follows the steps."""

import json

from metaflow import (
    FlowSpec,
    IncludeFile,
    Parameter,
    current,
    current_profile,
    gpu_profile,
    parallel,
    retry,
    step,
)


def train(model, data, steps, arguments):
    from datasets import Dataset
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    folder = str(current_profile().checkpoint_dir)
    config = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        logging_steps=1,
        save_steps=max(steps // 2, 1),
        report_to=[],
        **arguments,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in data.splitlines()]),
        callbacks=[current_profile().transformers_callback()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


class TrlFlow(FlowSpec):
    model = Parameter("model", help="A Hugging Face id, or a folder that all nodes have.", required=True)
    data = IncludeFile("data", help="JSON Lines with a text in each row.", required=True)
    steps = Parameter("steps", default=20)
    nodes = Parameter("nodes", default=2)

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @retry(times=1, minutes_between_retries=0)
    @gpu_profile(model="{model}", method="full", seq_len=128, global_batch_size=8, nodes="{nodes}")
    @parallel
    @step
    def train(self):
        arguments = current.gpu_profile.plan.to_transformers(sft=True)
        current.gpu_profile.torchrun(train, [self.model, self.data, self.steps, arguments])
        self.measured = current.gpu_profile.measured()
        self.next(self.join)

    @step
    def join(self, inputs):
        self.trained = max(task.measured.steps for task in inputs)
        self.next(self.end)

    @step
    def end(self):
        print("steps:", self.trained)


if __name__ == "__main__":
    TrlFlow()
