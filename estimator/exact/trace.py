"""Trace of one training step on fake tensors, with the live bytes of its phases."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from estimator.exact import kernels, sharding, torchtune_models, transformers_models, zero
from estimator.exact.built import BuiltModel
from estimator.exact.support import torchtune_modules
from estimator.exact.tracker import Part, StepTracker
from estimator.memory import implementations
from estimator.memory.states import divides_scales
from estimator.setup import Setup
from estimator.vocabulary import SHARDINGS

PACKAGES = {True: ("torch", "torchtune", "torchao"), False: ("torch", "transformers", "peft")}
AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def trace(setup: Setup) -> dict[str, Any]:
    """Trace one training step; returns the fields of ``ExactEstimate`` as plain values for JSON."""
    start = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(kernels.as_on_gpu(setup))
        meshes = stack.enter_context(sharding.fake_processes(setup))
        stack.enter_context(FakeTensorMode())
        tracker = StepTracker()
        built = _build(setup)
        sizes = _sizes(built)
        _distribute(setup, built, meshes)
        step = Step(setup, built, tracker)
        stack.enter_context(sharding.communication(tracker))
        step.run()
    moments, states, from_formula = zero.add_untraced_states(setup, tracker.peaks, step.states, sizes)
    return {
        "moments": moments,
        "states": states,
        "parameters": sizes["all"],
        "trainable_parameters": sizes["trained"],
        "from_formula": from_formula,
        "unmodeled": _unmodeled(setup),
        "seconds": time.perf_counter() - start,
        "versions": {
            name: installed for name in PACKAGES[torchtune_modules(setup)] if (installed := _version(name))
        },
    }


def _build(setup: Setup) -> BuiltModel:
    fp32_weights = setup.precision == "fp32" or setup.precision in AUTOCAST
    # FSDP2 with mixed precision shards fp32 weights; DeepSpeed's module is in bf16, with separate fp32 copies
    use_fp32 = fp32_weights or (setup.precision == "bf16-mixed" and setup.zero_stage is None)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if use_fp32 else torch.bfloat16)
    build = torchtune_models.build if torchtune_modules(setup) else transformers_models.build
    try:
        return build(setup)
    finally:
        torch.set_default_dtype(previous)


def _sizes(built: BuiltModel) -> dict[str, int]:
    return {
        "all": sum(kernels.weights_in(parameter) for parameter in built.model.parameters()),
        "trained": sum(parameter.numel() for parameter in built.trained),
    }


def _distribute(setup: Setup, built: BuiltModel, meshes: sharding.Meshes | None) -> None:
    """Apply tensor parallelism, compilation, checkpointing and FSDP2, in the order of the recipes."""
    if meshes is not None and setup.tensor > 1:
        sharding.split_tensors(setup, built, meshes)
    if setup.compile:
        torchtune_models.compile_blocks(setup, built)
    if setup.checkpointing != "none" and torchtune_modules(setup):
        torchtune_models.checkpoint_blocks(setup, built)
    if meshes is not None and SHARDINGS[setup.sharding].fsdp:
        sharding.shard(setup, built, meshes)


def _unmodeled(setup: Setup) -> list[str]:
    clauses = ["the CUDA context, NCCL's buffers and the allocator's fragmentation"]
    if SHARDINGS[setup.sharding].fsdp or setup.tensor > 1:
        clauses.append("buffers that a second CUDA stream frees late")
    if setup.replicate > 1 and not SHARDINGS[setup.sharding].fsdp:
        clauses.append("buckets of gradients that replicas exchange")
    if setup.zero_stage is not None:
        clauses.append("DeepSpeed's buckets and gathered weights; its states are computed, not traced")
    elif not zero.optimizer_traced(setup):
        clauses.append(f"the step of {setup.optimizer}, whose states are computed")
    if setup.engine_version:
        clauses.append(f"{setup.engine} {setup.engine_version}: the installed code is traced")
    if setup.compile:
        clauses.append("fusions of Inductor other than one kernel between two matrix products")
    if setup.quantization != "none":
        clauses.append("4-bit kernels: placeholders of the same sizes are traced")
    if setup.engine == "torchtitan":
        clauses.append("torchtitan's own modules: torchtune's with torchtitan's norms are traced")
    if setup.precision in AUTOCAST:
        clauses.append("CUDA's list of autocast operations: the CPU's is used")
    return clauses


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _loss_parallel(setup: Setup) -> Any:
    """Return the context of torchtitan's loss on logits that are sharded over the vocabulary."""
    if setup.tensor > 1 and setup.engine == "torchtitan" and setup.sequence_parallel:
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
    return nullcontext()


class Step:
    """One training step on fake tensors: forward, loss, backward, optimizer; observed by a tracker."""

    def __init__(self, setup: Setup, built: BuiltModel, tracker: StepTracker) -> None:
        self.setup, self.built, self.tracker = setup, built, tracker
        self.states: dict[str, int] = {}
        self._backward = False
        self._scales: list[torch.Tensor] = []  # of 4-bit weights

    def run(self) -> None:
        """Run the step. The tracker records the peak of each phase, ``states`` the bytes between steps."""
        setup, tracker = self.setup, self.tracker
        self._mark_weights()
        self._register_hooks()
        if not setup.adapters:
            vocab, hidden = setup.model.vocab // setup.tensor, setup.model.hidden
            tracker.head_shapes = {(vocab, hidden), (hidden, vocab)}
        tokens = torch.zeros(setup.sequences, setup.seq_len, dtype=torch.long)
        optimizer = self._optimizer()
        with tracker:
            # With accumulation, all passes but the first have the gradients of earlier ones
            for _ in range(min(setup.accumulation, 2)):
                tracker.reset_peaks()
                self._forward_and_backward(tokens)
            self.states = self._states()
            tracker.moment = "optimizer"
            if optimizer is not None:
                with tracker.during(Part.OPTIMIZER_TEMPORARIES):
                    optimizer.step()

    def _mark_weights(self) -> None:
        for name, parameter in self.built.model.named_parameters():
            adapter = any(prefix in name for prefix in ("lora_", "magnitude", "adaption_"))
            self.tracker.mark(parameter, Part.ADAPTERS if adapter else Part.WEIGHTS)
            divisor = self.setup.shard if divides_scales(self.setup) else 1
            scales = kernels.nf4_scale_bytes(parameter) // divisor
            if scales:
                self._scales.append(torch.empty(scales, dtype=torch.uint8))
                self.tracker.mark(self._scales[-1], Part.NF4)
        for buffer in self.built.model.buffers():
            self.tracker.mark(buffer, Part.BUFFERS)

    def _register_hooks(self) -> None:
        """Register hooks that mark phases and gradients."""
        built = self.built
        built.last_norm.register_forward_hook(self._on_loss_start)
        idle = self.setup.idle_blocks  # their results have no gradient
        for number, block in enumerate(built.blocks[idle:], idle):
            block.register_forward_hook(self._block_hook(number))
        if not SHARDINGS[self.setup.sharding].fsdp:
            for parameter in built.trained:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self.setup.zero_stage is not None:  # DeepSpeed copies each gradient into buffers immediately
            parameter.grad = None
            return
        self.tracker.mark(parameter.grad, Part.GRADIENTS)
        if self.setup.optimizer_in_backward:
            if parameter in self._steps:  # otherwise its kernel needs a GPU
                with self.tracker.during(Part.OPTIMIZER_TEMPORARIES):
                    self._steps[parameter].step()
            parameter.grad = None

    def _on_loss_start(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        tracker = self.tracker
        tracker.part, tracker.moment = Part.LOGITS, "loss"
        output.register_hook(self._on_loss_end)  # type: ignore[no-untyped-call]

    def _on_loss_end(self, _: torch.Tensor) -> None:
        self.tracker.part, self.tracker.moment = Part.ACTIVATIONS, "backward, last norm"

    def _block_hook(self, number: int) -> Any:
        """Return a forward hook of a block that marks the start of its backward pass as a phase."""
        last = len(self.built.blocks) - 1
        first = self.setup.idle_blocks
        name = {last: "backward, last block", first: "backward, first block"}.get(
            number, "backward, inner blocks"
        )

        def on_backward(_: torch.Tensor) -> None:
            self.tracker.moment = name

        def on_forward(_: nn.Module, __: Any, output: Any) -> None:
            if not self._backward:  # skip recomputation by a checkpoint
                (output[0] if isinstance(output, tuple) else output).register_hook(on_backward)

        return on_forward

    def _forward_and_backward(self, tokens: torch.Tensor) -> None:
        setup, tracker = self.setup, self.tracker
        tracker.part, tracker.moment, self._backward = Part.ACTIVATIONS, "forward", False
        cast = AUTOCAST.get(setup.precision)
        labels = torch.zeros_like(tokens)
        with torch.autocast("cpu", dtype=cast) if cast else nullcontext(), _loss_parallel(setup):
            loss = self.built.forward(tokens, labels)
            tracker.moment, self._backward = "backward, loss", True
            loss.backward()  # type: ignore[no-untyped-call]

    def _optimizer(self) -> _Stepper | None:
        """Build an optimizer of this process's shards, with allocated states; None if it runs elsewhere.

        It uses plain tensors that share the memory of the parameters: with DTensor, the tracker would also
        count tensors of shape propagation.
        """
        setup = self.setup
        self._steps: Any = torch.utils.weak.WeakIdKeyDictionary()
        if not zero.optimizer_traced(setup):
            return None
        if setup.optimizer_in_backward:
            for parameter in self.built.trained:
                self._steps[parameter] = self._with_states([parameter])
            return None
        return self._with_states(self.built.trained)

    def _with_states(self, parameters: list[nn.Parameter]) -> _Stepper:
        local_parameters = [nn.Parameter(sharding.local(parameter).detach()) for parameter in parameters]
        kind: Any = torch.optim.AdamW
        fused = implementations.fuses_optimizer(self.setup)
        on_gpu = self.setup.device == "cuda"
        options: dict[str, Any] = {"fused": fused and (on_gpu or self.setup.engine == "deepspeed")}
        if not fused:
            options = {"foreach": on_gpu}
        if self.setup.optimizer == "sgd":
            kind, options = torch.optim.SGD, {"momentum": 0.9, "lr": 1e-3, "foreach": False}
        optimizer = kind(local_parameters, **options)
        for parameter in local_parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        for parameter in local_parameters:
            parameter.grad = None
            for state in optimizer.state[parameter].values():
                if isinstance(state, torch.Tensor):
                    self.tracker.mark(state, Part.OPTIMIZER)
        return _Stepper(optimizer, list(zip(local_parameters, parameters, strict=True)))

    def _states(self) -> dict[str, int]:
        persistent = (Part.WEIGHTS, Part.ADAPTERS, Part.GRADIENTS, Part.OPTIMIZER, Part.NF4, Part.BUFFERS)
        live = self.tracker.now()
        return {part.value: live[part.value] for part in persistent if live.get(part.value)}


class _Stepper:
    """Optimizer of plain tensors that share the memory of the model's parameters, with their gradients."""

    def __init__(self, optimizer: Any, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._optimizer, self._pairs = optimizer, pairs

    def step(self) -> None:
        for local, parameter in self._pairs:
            local.grad = sharding.local_gradient(parameter)
        self._optimizer.step()
        for local, _ in self._pairs:
            local.grad = None
