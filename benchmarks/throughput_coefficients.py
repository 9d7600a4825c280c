"""Coefficients that benchmarks.fit_throughput fits: meaning, physical prior, width of the prior.

To add one, add a line here, use it in estimator/throughput/, and fit again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from estimator import hardware

MEANINGS = {
    "products": "rate of matrix products in training over the best one measured on the GPU (gpus.csv)",
    "products of": "that share on this architecture or GPU over the common one",
    "best product": "best measured matrix product over the peak, where the GPU's own was not measured",
    "attention": "rate of attention over that of matrix products, causal half counted",
    "masked attention": "rate of attention under a dense mask, all pairs counted, over that without one",
    "moved": "time for bytes between products, over that of eager kernels at the full memory bandwidth",
    "dequantized": "time to unpack frozen 4-bit weights, over that of its bytes at the full memory bandwidth",
    "grouped products": "rate of the experts' products over that of dense ones",
    "exposed tensor": "exposed (not overlapped) tensor parallel communication over its time on the links",
    "exposed expert": "exposed (not overlapped) expert exchange over its time on the links",
    "hop": "seconds that a ring of sharded weights takes from one node to the next",
    "overlap": "power p of the p-norm by which overlapping times add up",
    "optimizer": "time of the optimizer's step over that of its bytes at the full memory bandwidth",
    "launch": "seconds of the host to launch one layer forward and backward",
    "launch of experts": "the same, in addition, for a layer of experts",
    "launch of adapters": "the same, in addition, for a layer with adapters",
    "launch of tensor": "the same, in addition, under tensor parallelism",
    "launch on Grace": "time of a Grace CPU to launch a kernel over that of an x86 host",
    "gain": "rate of matrix products in this recipe over bf16",
}


@dataclass(frozen=True)
class Spec:
    """One coefficient. ``width`` is the prior's standard deviation in log; fixed ones are not fitted."""

    name: str
    scope: str
    prior: float
    width: float
    fitted: bool = True
    source: str = ""

    @property
    def meaning(self) -> str:
        return MEANINGS[self.name]


def _fixed(name: str, scope: str, value: float, source: str) -> Spec:
    return Spec(name, scope, value, 1.0, fitted=False, source=source)


def usual_best_products() -> dict[str, float]:
    """Return by architecture the median ratio of best measured matrix product to peak (training dtype)."""
    shares: dict[str, list[float]] = {}
    for gpu in hardware.catalogue().gpus:
        peak = gpu.peak_flops("bf16" if gpu.bf16 else "fp32")
        if gpu.measured_tflops is not None and peak is not None and gpu.architecture is not None:
            shares.setdefault(gpu.architecture, []).append(gpu.measured_tflops * 1e12 / peak)
    return {name: round(statistics.median(values), 3) for name, values in shares.items()}


# Prior width of "products of": deviation of an architecture or GPU from the common ratio "products"
GPU_WIDTH = 0.3

SPECS = (
    Spec("products", "*", 0.80, 0.3),
    *(
        Spec("products of", scope, 1.0, GPU_WIDTH)
        for scope in (
            "Ampere 8.0",
            "Hopper 9.0",
            "H100 SXM 96GB HBM2e 500W",
            "Blackwell 10.0",
            "GB200 (per GPU)",
            "Blackwell Ultra 10.3",
            "GB300 (per GPU)",
            "RTX 4090",
            "CDNA3",
        )
    ),
    *(
        _fixed("best product", name, share, "median over the GPUs of gpus.csv with both figures")
        for name, share in usual_best_products().items()
    ),
    Spec("attention", "*", 0.60, 0.3),
    Spec("attention", "Ampere 1", 0.45, 0.3),
    # FlashAttention-2 (arXiv:2307.08691, figures 5 and 7, causal, heads of 128, 16,384 tokens, forward and
    # backward): 189 TFLOPS on an A100, 338 on an H100
    Spec("attention", "Ampere 2", 0.75, 0.3),
    Spec("attention", "Hopper 1", 0.35, 0.3),
    Spec("attention", "Hopper 2", 0.56, 0.3),
    # FlashAttention-3 (arXiv:2407.08608, figures 5 and 6, likewise): 648 forward, 560 backward on an H100
    Spec("attention", "Hopper 3", 0.95, 0.2),
    Spec("attention", "Blackwell 4", 1.0, 0.3),
    Spec("attention", "Hopper fused", 0.70, 0.3),
    # Flash attention's kernels take no mask; torch takes its memory-efficient ones, made for Ampere
    Spec("masked attention", "*", 0.6, 0.3),
    Spec("moved", "eager", 1.0, 0.3),
    Spec("moved", "compiled", 0.6, 0.3),
    # Llama's blocks in bytes a unit of width, against the eager ones of flops.py: norms 4 for 24, rotary
    # embedding 4 for 12, gated activation 6 for 10, sums and layout as they are
    Spec("moved", "fused", 0.45, 0.3),
    Spec("dequantized", "compiled", 2.0, 0.7),
    Spec("dequantized", "*", 2.0, 0.7),
    Spec("dequantized", "torchtune eager", 2.0, 0.7),
    Spec("grouped products", "*", 0.7, 0.4),
    Spec("grouped products", "full-graph", 0.7, 0.4),
    Spec("exposed tensor", "*", 1.0, 0.4),
    Spec("exposed tensor", "fused", 0.4, 0.4),
    Spec("exposed expert", "*", 0.7, 0.4),
    Spec("overlap", "*", 3.0, 0.3),
    # 8 GPUs of a node, about 12 us each: NCCL sends a large message in slices, one GPU after the other
    Spec("hop", "*", 100e-6, 0.7),
    Spec("optimizer", "*", 1.5, 0.3),
    Spec("launch", "*", 0.001, 0.7),
    Spec("launch", "deepspeed", 0.0015, 0.7),
    Spec("launch", "deepspeed zero3", 0.010, 0.7),
    Spec("launch", "deepspeed zero3 alone", 0.005, 0.7),  # its hooks without the collectives
    Spec("launch", "megatron", 0.0005, 0.7),
    Spec("launch of adapters", "*", 0.0005, 0.7),
    Spec("launch of adapters", "transformers", 0.0025, 0.7),
    Spec("launch of adapters", "deepspeed", 0.0025, 0.7),
    Spec("launch of experts", "*", 0.004, 0.7),
    Spec("launch of experts", "attention-graph", 0.002, 0.7),
    Spec("launch of experts", "full-graph", 0.001, 0.7),
    Spec("launch on Grace", "*", 1.0, 0.5),
    Spec("launch of tensor", "*", 0.0005, 0.7),
    Spec("launch of tensor", "eager", 0.005, 0.7),
    Spec("gain", "Hopper tensorwise", 1.5, 0.2),
    Spec("gain", "Hopper tensorwise eager", 1.0, 0.5),
    Spec("gain", "Hopper rowwise", 1.3, 0.2),
    Spec("gain", "Hopper te", 1.6, 0.2),
    Spec("gain", "Blackwell te", 1.7, 0.2),
    # torchao's kernels and TransformerEngine's differ: runs with one say little about the other
    Spec("gain", "Blackwell mxfp8 fused", 1.6, 0.2),
    Spec("gain", "Blackwell mxfp8 compiled", 1.4, 0.3),
    Spec("gain", "Blackwell nvfp4 fused", 2.0, 0.3),
    Spec("gain", "Blackwell nvfp4 compiled", 1.7, 0.3),
    Spec("gain", "Blackwell Ultra te", 1.7, 0.2),
    Spec("gain", "Blackwell Ultra mxfp8 fused", 1.6, 0.2),
    Spec("gain", "Blackwell Ultra nvfp4 fused", 2.5, 0.3),
)
