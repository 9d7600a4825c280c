# Lightning's Trainer, with the arguments of the plan
# python examples/lightning_flow.py run --model MODEL
"""Lightning: `plan.to_lightning()` holds the arguments of the trainer, a callback reports its steps."""

from metaflow import FlowSpec, Parameter, current, current_profile, gpu_profile, step


def train(model, steps, plan):
    import lightning
    import torch
    from transformers import AutoModelForCausalLM

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

        def training_step(self, ids, _):
            return self.network(input_ids=ids, labels=ids).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    module = Module()
    rows = torch.randint(0, module.network.config.vocab_size, (64, plan.layout.seq_len))  # your data
    trainer = lightning.Trainer(
        max_steps=steps,
        default_root_dir=current_profile().checkpoint_dir,
        logger=False,
        callbacks=[current_profile().lightning_callback()],
        **plan.to_lightning(),
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=plan.layout.micro_batch_size))


class LightningFlow(FlowSpec):
    model = Parameter("model", help="A folder or a Hugging Face id.", required=True)
    steps = Parameter("steps", default=10)

    @gpu_profile(model="{model}", method="full", seq_len=128, global_batch_size=8)
    @step
    def start(self):
        current.gpu_profile.torchrun(train, [self.model, self.steps, current.gpu_profile.plan])
        self.measured = current.gpu_profile.measured()
        self.next(self.end)

    @step
    def end(self):
        print("steps:", self.measured.steps)


if __name__ == "__main__":
    LightningFlow()
