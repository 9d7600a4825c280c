"""Speed and price: seconds of a training step, tokens a second, model FLOPs utilization, hours and money.

A step consists of computing, communication that does not overlap with it, the pipeline's bubble and the
optimizer. ``flops`` counts the work, ``communication`` the volumes; ``efficiency`` has the rates that GPUs
and kernels reach. A GPU without a sourced peak or measured product, and a CPU, have no
predicted speed. docs/throughput.md has the formulas in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from estimator.errors import UserError
from estimator.hardware.catalogue import Gpu
from estimator.memory.generation import grpo_batch
from estimator.models import DiffusionSpec
from estimator.setup import Setup
from estimator.throughput import launches
from estimator.throughput.communication import (
    Links,
    MeasuredBandwidth,
    Times,
    collective_seconds,
    communication_seconds,
    links,
)
from estimator.throughput.efficiency import (
    Efficiency,
    attention_scopes,
    basis_of,
    kernels,
    low_precision_gain,
    products_rate,
    published,
    range_scope,
)
from estimator.throughput.flops import Work, model_flops_per_token, weights_of, work
from estimator.throughput.generation import GenerationSpeed, generation_speed
from estimator.vocabulary import OPTIMIZERS, SHARDINGS, product_type

__all__ = ["KernelTimes", "MeasuredBandwidth", "Parts", "Speed", "cost", "flops_per_token", "speed"]

_NETWORK = "the network between the nodes"
flops_per_token = model_flops_per_token

# Parameters a second that AdamW updates on one host. At least 3.4e9: torchtune README @30b8519e8, 70B full on
# 8 A100 with the optimizer on the host, 32,768 tokens in 20.9 s with all the rest. At least 1.3e9: 3.1e9 in
# 2.4 s with all the rest (microsoft/DeepSpeed#7474).
HOST_ADAM = 3.4e9
# Bytes a second between GPU and host: 80 % of one direction of PCIe x16, 31.5 GB/s in version 4.0, 63 in 5.0
HOST_LINK = {"Hopper": 50e9, "Blackwell": 50e9, "Blackwell Ultra": 50e9, "*": 25e9}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Seconds of kernels by kind, of one micro batch or of a step.

    Their sum is below ``Parts.compute`` if the GPU waits for the host to launch them.
    """

    products: float  # matrix products, including those of experts and reading their weights
    attention: float
    memory_bound: float  # operators between the products, and dequantization of weights

    @property
    def total(self) -> float:
        """Sum of the seconds of all kernels."""
        return self.products + self.attention + self.memory_bound

    def times(self, count: float) -> KernelTimes:
        """Return the times of ``count`` micro batches."""
        return KernelTimes(
            products=self.products * count,
            attention=self.attention * count,
            memory_bound=self.memory_bound * count,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Seconds of one optimizer step by part."""

    compute: float
    communication: float  # not overlapped with computing
    bubble: float
    optimizer: float
    generation: float = 0.0  # generation and scoring of the answers
    kernel_times: KernelTimes
    collectives: tuple[tuple[str, float], ...] = ()  # by kind, including overlapped ones

    @property
    def total(self) -> float:
        """Seconds of the complete step."""
        return self.compute + self.communication + self.bubble + self.optimizer + self.generation

    def scaled(self, factor: float) -> Parts:
        """Return the parts with all seconds multiplied by ``factor``."""
        return Parts(
            compute=self.compute * factor,
            communication=self.communication * factor,
            bubble=self.bubble * factor,
            optimizer=self.optimizer * factor,
            generation=self.generation * factor,
            kernel_times=self.kernel_times.times(factor),
            collectives=tuple((name, seconds * factor) for name, seconds in self.collectives),
        )

    @property
    def kinds(self) -> tuple[tuple[str, float], ...]:
        """Parts by name, without empty ones; their sum is the complete step."""
        named = {
            "forward and backward": self.compute,
            "collectives, exposed": self.communication,
            "pipeline bubble": self.bubble,
            "optimizer": self.optimizer,
            "generation": self.generation,
        }
        return tuple((name, seconds) for name, seconds in named.items() if seconds)

    @property
    def of_compute(self) -> tuple[tuple[str, float], ...]:
        """Kernels of ``compute`` by name, as in a profile."""
        return (
            ("products", self.kernel_times.products),
            ("attention", self.kernel_times.attention),
            ("other operators", self.kernel_times.memory_bound),
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted speed over all processes; None: unknown.

    ``mfu`` is model FLOPs (``flops_per_token``) over the dense bf16 peak, whatever the precision.
    ``tokens_per_second_range`` holds 95 % of the published runs when their source is left out of
    the fit; on an architecture without a published run, when their architecture is. It is wider for engines
    whose runs it would hold less often.
    """

    tokens_per_second: float | None
    basis: str
    mfu: float | None = None
    step_seconds: float | None = None
    parts: Parts | None = None
    tokens_per_second_range: tuple[float, float] | None = None
    uncorrected: float | None = None  # tokens/s before the correction by finished runs; None: not corrected
    formulas: str = ""  # calibration.speed.formulas() at that time; empty: not recorded


class Cost(NamedTuple):
    """Hours and USD for a number of tokens; None: unknown speed or price."""

    hours: float | None
    usd: float | None


def cost(tokens: float, speed: Speed, usd_per_hour: float | None) -> Cost:
    """Return hours and USD for a number of tokens; ``usd_per_hour``: of all machines in sum."""
    if tokens < 0:
        raise UserError(f"{tokens:,.0f} is not a number of training tokens.", "Use a number of at least 0.")
    if usd_per_hour is not None and usd_per_hour < 0:
        raise UserError(f"A price of {usd_per_hour} USD an hour is below 0.")
    if speed.tokens_per_second is None:
        return Cost(None, None)
    hours = tokens / speed.tokens_per_second / 3600
    return Cost(hours, None if usd_per_hour is None else hours * usd_per_hour)


def speed(
    setup: Setup,
    gpu: Gpu | None,
    *,
    network_gbps: float | None = None,
    rdma: bool = False,
    busbw: MeasuredBandwidth | None = None,
    efficiency: Efficiency | None = None,
) -> Speed:
    """Predict the tokens per second of the complete job; preference pairs count both sequences.

    Parameters
    ----------
    network_gbps, rdma:
        Rate of one node's network in gigabits a second, and whether it is EFA, InfiniBand or RoCE.
    busbw:
        Rates measured on the cluster; they replace the datasheet's.
    efficiency:
        Coefficients in place of the published ones; the fit uses it.
    """
    table = efficiency or published()
    if setup.device == "cpu" or gpu is None:
        return Speed(None, "no published speed for this device")
    if isinstance(setup.model, DiffusionSpec):
        return Speed(None, f"no run of {setup.model.name} was published as a whole configuration")
    reason = _unknown(setup, gpu, table)
    if reason:
        return Speed(None, reason)
    wires = links(setup, gpu, network_gbps=network_gbps, rdma=rdma, busbw=busbw)
    load = work(setup)
    times = communication_seconds(setup, wires)
    if times is None:
        fast = wires.intra_bytes_per_s is None and wires.domain > 1 and setup.world_size > 1
        unknown = f"the link between the GPUs of a node with the {gpu.name}" if fast else _NETWORK
        return Speed(None, f"{unknown} is not known")
    parts = step(setup, load, gpu, times, table)
    generated = _answer_generation(setup, gpu)
    if generated is not None and generated.seconds is None:
        return Speed(None, generated.basis)
    tokens = setup.sequences * setup.seq_len * setup.data_parallel * setup.accumulation
    trained, generation = parts.total, (0.0, 0.0)  # seconds, of drawing at the fast and at the slow end
    launched = launch_seconds(setup, load, table) * host_slowdown(gpu, table)
    is_launch_bound = launched * setup.accumulation > parts.kernel_times.total
    if generated is not None and generated.seconds is not None:
        generation = generated.seconds
        parts = replace(parts, generation=math.sqrt(generation[0] * generation[1]))
    rate = tokens / parts.total
    peak = gpu.peak_flops("bf16") or 0.0
    mfu = rate * load.model_flops_per_token / (peak * setup.world_size) if peak else None
    prefix = "" if ("runs", gpu.architecture or "") in table.table else "unseen "
    low, high = _range(setup, table, prefix)
    basis = _basis(setup, gpu, table, wires, parts)
    slowest, fastest = 0.0, _least_seconds(setup, load, gpu)
    if is_launch_bound:
        basis += "; bound by the host's kernel launches, which was not measured on small models"
        count = launches.of_step(setup, load.layers)
        slowest, fastest = count * launches.SLOWEST_LAUNCH, max(fastest, count * launches.FASTEST_LAUNCH)
    if generated is not None:
        basis += f"; generation time: middle of its range, {generated.basis}"
    return Speed(
        tokens_per_second=rate,
        basis=basis,
        mfu=mfu,
        step_seconds=parts.total,
        parts=parts,
        tokens_per_second_range=None
        if low is None or high is None
        else (
            tokens / (max(trained / low, slowest) + generation[1]),
            tokens / (max(trained / high, fastest) + generation[0]),
        ),
    )


def _range(setup: Setup, table: Efficiency, prefix: str) -> tuple[float | None, float | None]:
    """Return both ends of the range over the prediction, wider for kinds of runs that are further off."""
    low, high = table.get("range", f"{prefix}p2.5"), table.get("range", f"{prefix}p97.5")
    if low is None or high is None:
        return None, None
    scope = range_scope(setup)
    own_low, own_high = table.get("range", f"{scope} p2.5"), table.get("range", f"{scope} p97.5")
    return min(low, own_low or low), max(high, own_high or high)


def _least_seconds(setup: Setup, load: Work, gpu: Gpu) -> float:
    """Return the seconds of a step's matrix products at the GPU's peak; 0 if unknown, and in 8 or 4 bits."""
    peak = gpu.peak_flops(product_type(setup.precision))
    if peak is None or setup.fp8 != "none":
        return 0.0
    return setup.accumulation * (load.linear + load.expert + load.head + load.attention) / peak


def _answer_generation(setup: Setup, gpu: Gpu) -> GenerationSpeed | None:
    """Return the time of one batch with all answers of a step; None for tasks without generation.

    TRL 1.16 (trainer/grpo_trainer.py, _prepare_inputs) generates those of all micro batches at once.
    """
    if not setup.answer_len:
        return None
    return generation_speed(setup.model, gpu, grpo_batch(setup))


def step(setup: Setup, load: Work, gpu: Gpu, times: Times, table: Efficiency) -> Parts:
    """Return the seconds of one optimizer step by part."""
    kind, power = kernels(setup), table.of("overlap")
    computing = kernel_seconds(setup, load, gpu, table)
    slowdown = host_slowdown(gpu, table)
    launched = launch_seconds(setup, load, table) * slowdown
    outside, updating = (seconds * slowdown for seconds in _launch_seconds_outside(setup, table))
    if setup.looped_experts and setup.model.experts:  # the host waits for the tokens of each expert
        waited = load.layers * table.of("launch of experts", setup.engine_version, setup.engine) * slowdown
        busy = waited + max(
            _overlapped(computing.total, launched - waited, power), launched - waited + outside
        )
    else:
        busy = max(_overlapped(computing.total, launched, power), launched + outside)
    exposed = times.tensor * table.of("exposed tensor", kind)
    exposed += times.expert * table.of("exposed expert", kind)
    copied = _copied_bytes(setup, load) / host_link(gpu)
    hop = table.of("hop")
    micro = _overlapped(busy + exposed, times.overlapped + times.hops * hop + copied, power)
    # gradients behind the last backward pass, then the weights that ZeRO-1 and ZeRO-2 have updated in shards
    last = _overlapped(micro, times.reduced_per_step + times.hops_step * hop, power)
    if setup.engine == "deepspeed":  # 0.19.8, runtime/zero/stage_1_and_2.py, step: behind the optimizer
        last += times.gather_step
    else:
        last = _overlapped(last, times.gather_step, power)
    compute = busy * setup.accumulation
    return Parts(
        compute=compute,
        communication=micro * (setup.accumulation - 1) + last - compute,
        bubble=micro * (setup.pipeline - 1) / setup.virtual_stages,
        optimizer=max(optimizer_seconds(setup, load, gpu, table), updating),
        kernel_times=computing.times(setup.accumulation),
        collectives=collective_seconds(setup, times),
    )


def kernel_seconds(setup: Setup, load: Work, gpu: Gpu, table: Efficiency) -> KernelTimes:
    """Return the GPU seconds of one micro batch: products, attention, and memory-bound kernels."""
    kind = kernels(setup)
    bandwidth = (gpu.bandwidth_gbps or 0.0) * 1e9
    rate = products_rate(gpu, setup.precision, table) or 0.0
    speed_up = low_precision_gain(setup, gpu, table) or 1.0
    products = (load.linear / speed_up + load.head) / rate
    grouped = 1.0 if setup.looped_experts else table.of("grouped products", setup.engine_version)
    products += load.expert / speed_up / (rate * grouped)
    products += load.weights / bandwidth
    attention_rate = rate * table.of("attention", *attention_scopes(setup, gpu))
    if setup.document_mask and setup.attention == "flash":
        attention_rate *= table.of("masked attention")
    memory_bound = (load.moved + load.copied) * table.of("moved", kind) / bandwidth
    memory_bound += load.dequantized * table.of("dequantized", f"{setup.engine} {kind}", kind) / bandwidth
    memory_bound += load.quantized / bandwidth
    return KernelTimes(
        products=products, attention=load.attention / attention_rate, memory_bound=memory_bound
    )


def host_slowdown(gpu: Gpu, table: Efficiency) -> float:
    """Return the time that the GPU's host takes to launch a kernel, over that of an x86 host."""
    return table.of("launch on Grace") if gpu.name.startswith(("GB", "GH")) else 1.0


def launch_seconds(setup: Setup, load: Work, table: Efficiency) -> float:
    """Return the seconds in which the host launches the blocks' kernels for one micro batch."""
    launch = _block_launch(setup, table)
    if setup.model.experts:
        launch += table.of("launch of experts", setup.engine_version, setup.engine)
    if setup.adapters:
        launch += table.of("launch of adapters", setup.engine)
    if setup.tensor > 1:
        launch += table.of("launch of tensor", kernels(setup))
    return load.layers * launch * launches.fused_share(setup)


def _block_launch(setup: Setup, table: Efficiency) -> float:
    """Return the seconds in which the host launches one block's eager kernels, forward and backward.

    DeepSpeed's ZeRO-3 gathers nothing in a single process (0.19.8, runtime/zero/partition_parameters.py,
    NoGatherCoalescedHandle).
    """
    scope = f"{setup.engine} {setup.sharding}"
    alone = (f"{scope} alone",) if setup.world_size == 1 else ()
    return table.of("launch", *alone, scope, setup.engine)


def _launch_seconds_outside(setup: Setup, table: Efficiency) -> tuple[float, float]:
    """Return the host's seconds for kernels outside of the blocks per micro batch, and of the optimizer."""
    one_launch = _block_launch(setup, table) / launches.in_block("eager", adapters=False)
    return launches.outside(setup) * one_launch, launches.of_optimizer(setup) * one_launch


def optimizer_seconds(setup: Setup, load: Work, gpu: Gpu, table: Efficiency) -> float:
    """Return the seconds of one optimizer step of one process."""
    shards = setup.tensor * setup.pipeline
    if SHARDINGS[setup.sharding].divides:
        shards *= setup.shard
    parameters = load.trained / shards
    if setup.offload != "none":
        # The node's processes share its cores; gradients go there and weights come back
        return parameters * setup.processes_per_node / HOST_ADAM + parameters * 4 / host_link(gpu)
    size = OPTIMIZERS[setup.optimizer].traffic_bytes * (0.5 if setup.precision == "bf16" else 1.0)
    traffic_bytes = parameters * size + load.copied_once
    seconds = traffic_bytes * table.of("optimizer") / ((gpu.bandwidth_gbps or 1.0) * 1e9)
    return seconds + _paged_bytes(setup, gpu, parameters) / host_link(gpu)


def _paged_bytes(setup: Setup, gpu: Gpu, parameters: float) -> float:
    """Return the bytes that a paged optimizer transfers per step: states that do not fit, both ways."""
    if not setup.optimizer.startswith("paged"):
        return 0.0
    size = 4 if setup.precision == "fp32" else 2
    # bitsandbytes 0.50.2, optim/optimizer.py, init_state: 32-bit states are fp32 whatever the weights are
    states = 2 * parameters * (1 if "8bit" in setup.optimizer else 4)
    resident = weights_of(setup.model).all * size + (0 if setup.optimizer_in_backward else parameters * size)
    return 2 * min(states, max(resident + states - gpu.usable_bytes, 0.0))


def _copied_bytes(setup: Setup, load: Work) -> float:
    """Return the bytes that one process copies from and to its host for one micro batch."""
    copied = load.offloaded
    if setup.offload == "all":  # the process's share of the weights, once per forward and backward pass
        size = 4 if setup.precision == "fp32" else 2
        shards = setup.shard * setup.tensor * setup.pipeline
        copied += 2 * weights_of(setup.model).all * size / shards
    return copied


def host_link(gpu: Gpu) -> float:
    """Return the bytes per second between a GPU and its host, in one direction."""
    return HOST_LINK.get(gpu.architecture or "*", HOST_LINK["*"])


def _overlapped(first: float, second: float, power: float) -> float:
    """Return the seconds of two overlapping tasks: their p-norm, with least overlap for equal durations."""
    if not second or not first:
        return first + second
    large, small = (first, second) if first > second else (second, first)
    return float(large * (1 + (small / large) ** power) ** (1 / power))


def _unknown(setup: Setup, gpu: Gpu, table: Efficiency) -> str:
    """Return the reason why the speed is unknown, as one clause; "" if it can be predicted."""
    if products_rate(gpu, setup.precision, table) is None:
        return f"neither peak nor measured rate for the {gpu.name} in the precision of its products"
    if gpu.bandwidth_gbps is None:
        return f"no sourced memory bandwidth for the {gpu.name}"
    if low_precision_gain(setup, gpu, table) is None:
        return f"no published run in {setup.fp8} on a {gpu.architecture} GPU"
    return ""


def _basis(setup: Setup, gpu: Gpu, table: Efficiency, wires: Links, parts: Parts) -> str:
    text = basis_of(setup, gpu, table)
    if setup.precision == "fp32":
        text += "; published runs are in bf16, fp32 is assumed to reach the same share of its peak"
    if wires.basis:
        text += f"; {wires.basis}"
    if parts.communication > parts.compute:
        text += "; the network is slower than the GPUs"
    return text
