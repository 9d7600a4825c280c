# A loop with Accelerate and DeepSpeed's ZeRO, with the plugin of the plan
# python examples/accelerate_flow.py run --model MODEL
"""Accelerate and DeepSpeed: `plan.to_accelerate()` holds the arguments of Accelerator and its plugin."""

from metaflow import FlowSpec, Parameter, current, current_profile, gpu_profile, step


def train(model, steps, plan):
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import AutoModelForCausalLM

    if not torch.cuda.is_available():
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled, which takes minutes
    values = plan.to_accelerate()
    if "deepspeed_plugin" in values:
        values["deepspeed_plugin"] = DeepSpeedPlugin(**values["deepspeed_plugin"])
    accelerator = Accelerator(**values)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    batch, length = plan.layout.micro_batch_size, plan.layout.seq_len
    count = steps * plan.layout.accumulation * batch * accelerator.num_processes
    rows = torch.randint(0, network.config.vocab_size, (count, length))  # your data
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for number, ids in enumerate(loader, start=1):
        with accelerator.accumulate(network):
            loss = network(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % plan.layout.accumulation == 0:
            done = number // plan.layout.accumulation
            current_profile().report(step=done, loss=loss.item(), tokens=ids.numel())


class AccelerateFlow(FlowSpec):
    model = Parameter("model", help="A folder or a Hugging Face id.", required=True)
    steps = Parameter("steps", default=10)
    gpus = Parameter("gpus", default=1, help="GPUs of the node; with --device cpu its processes.")
    device = Parameter("device", default="auto", help="cuda, cpu, or auto: GPUs if there are any.")

    @gpu_profile(
        model="{model}",
        method="full",
        engine="deepspeed",
        seq_len=128,
        global_batch_size=8,
        gpus="{gpus}",
        device="{device}",
    )
    @step
    def start(self):
        current.gpu_profile.torchrun(train, [self.model, self.steps, current.gpu_profile.plan])
        self.measured = current.gpu_profile.measured()
        self.next(self.end)

    @step
    def end(self):
        print("steps:", self.measured.steps)


if __name__ == "__main__":
    AccelerateFlow()
