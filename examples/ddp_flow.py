# A plain PyTorch loop with DistributedDataParallel on two nodes
# python examples/ddp_flow.py run
"""Plain DDP: a training function of this file in every process of two nodes, with checkpoints."""

from metaflow import FlowSpec, Parameter, current, current_profile, gpu_profile, parallel, retry, step


def train(steps, checkpoint_every):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    folder = current_profile().checkpoint_dir
    saved = sorted(folder.glob("step-*.pt"))
    first = 1
    if saved:
        state = torch.load(saved[-1], weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["step"] + 1
        print(f"resumes at step {first}", flush=True)

    torch.manual_seed(rank)
    for number in range(first, steps + 1):
        features = torch.randn(32, 16, device=device)
        loss = torch.nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        current_profile().report(step=number, loss=loss.item(), samples=32)
        if rank == 0 and number % checkpoint_every == 0:
            torch.save({"model": model.module.state_dict(), "step": number}, folder / f"step-{number:06d}.pt")
    del model  # before its process group: DDP with the last reference to it may hang (torch 2.13)
    dist.destroy_process_group()


class DdpFlow(FlowSpec):
    nodes = Parameter("nodes", default=2)
    steps = Parameter("steps", default=200)
    checkpoint_every = Parameter("checkpoint-every", default=50)

    @step
    def start(self):
        self.next(self.train, num_parallel=self.nodes)

    @retry(times=1, minutes_between_retries=0)
    @gpu_profile
    @parallel
    @step
    def train(self):
        current.gpu_profile.torchrun(train, [self.steps, self.checkpoint_every])
        self.measured = current.gpu_profile.measured()
        self.next(self.join)

    @step
    def join(self, inputs):
        self.trained = [task.measured.steps for task in inputs]
        self.next(self.end)

    @step
    def end(self):
        print("steps on each node:", self.trained)


if __name__ == "__main__":
    DdpFlow()
