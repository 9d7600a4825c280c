"""Attribution of time in a trace, on small handwritten traces. Times are in microseconds."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from estimator import Job, Target, plan
from estimator.models import find
from launchers.report import trace
from launchers.report.trace import Operator, Split, read_trace, split
from launchers.report.window import Window, collectives, compare, milliseconds, summary_lines

Event = dict[str, Any]


def _span(
    name: str, begin: float, end: float, category: str = "cpu_op", thread: int = 1, **args: Any
) -> Event:
    values = {"name": name, "cat": category, "pid": 1, "tid": thread, "args": args}
    return {"ph": "X", "ts": begin, "dur": end - begin, **values}


def _mark(name: str, begin: float, end: float, thread: int = 1) -> Event:
    return _span(name, begin, end, "user_annotation", thread)


STEP = _mark(f"{trace.STEP}3", 0, 1000)


def _microseconds(window: Split) -> dict[str, float]:
    return {kind: pytest.approx(seconds * 1e6) for kind, seconds in window.seconds}


def test_on_a_cpu_time_is_attributed_to_the_innermost_operator() -> None:
    window = split(
        [
            STEP,
            _mark(f"{trace.PHASE}data", 0, 100),
            _span("aten::index", 10, 90),
            _span("aten::linear", 100, 400),
            _span("aten::addmm", 120, 380),
            _span("aten::copy_", 130, 150),
            _span("aten::scaled_dot_product_attention", 400, 500),
            _span("aten::bmm", 410, 490),  # attention's own
            _mark("Optimizer.step#AdamW.step", 700, 900),
            _span("aten::mul_", 710, 800),
        ]
    )
    assert window.device == "cpu"
    assert _microseconds(window) == {
        "products": 280,
        "attention": 100,
        "other operators": 20,
        "optimizer": 200,
        "data": 100,
        "idle": 300,
    }
    assert window.step_seconds == pytest.approx(1e-3)
    assert window.operators[0] == Operator(name="aten::addmm", seconds=pytest.approx(240e-6), calls=1)


def test_the_cost_of_a_collective_is_the_wait_of_the_training_thread() -> None:
    window = split(
        [
            STEP,
            _span("aten::mm", 0, 600),
            _mark("gloo:all_reduce", 500, 800, thread=2),
        ]
    )
    assert _microseconds(window) == {"products": 600, "all_reduce": 200, "idle": 200}
    assert dict(window.hidden) == {"all_reduce": pytest.approx(100e-6)}


def test_on_a_gpu_stream_time_is_attributed_to_the_operator_that_launched_the_kernel() -> None:
    window = split(
        [
            STEP,
            _span("aten::mm", 0, 20),
            _span("cudaLaunchKernel", 5, 10, "cuda_runtime", correlation=7),
            _span("some_kernel", 100, 400, "kernel", 7, correlation=7),
            _span("ncclDevKernel_AllGather_RING", 300, 600, "kernel", 8),
            _mark("Optimizer.step#AdamW.step", 20, 60),
            _span("aten::_foreach_add_", 30, 50),
            _span("cudaLaunchKernel", 35, 40, "cuda_runtime", correlation=8),
            _span("multi_tensor_apply", 700, 800, "kernel", 7, correlation=8),
        ]
    )
    assert window.device == "cuda"
    assert _microseconds(window) == {"products": 300, "optimizer": 100, "all_gather": 200, "idle": 400}
    assert dict(window.hidden) == {"all_gather": pytest.approx(100e-6)}
    assert {each.name for each in window.operators} >= {"aten::mm", "aten::_foreach_add_"}


def test_steps_are_averaged_and_time_between_steps_is_omitted() -> None:
    steps = [_mark(f"{trace.STEP}{n}", begin, begin + 100) for n, begin in ((1, 0), (2, 500))]
    window = split(
        [*steps, _span("aten::mm", 0, 50), _span("aten::mm", 200, 400), _span("aten::mm", 500, 530)]
    )
    assert (window.steps, window.step_seconds) == (2, pytest.approx(100e-6))
    assert _microseconds(window) == {"products": 40, "idle": 60}


STEP_OF_100 = _mark(f"{trace.STEP}1", 100, 200)


@pytest.mark.parametrize(
    "work",
    [
        [_span("aten::mm", 50, 120), _span("aten::add", 190, 300)],
        [_span("gemm", 50, 120, "kernel", 7), _span("copy", 190, 300, "gpu_memcpy", 7)],
    ],
)
def test_operators_that_extend_beyond_a_step_count_only_within_it(work: list[Event]) -> None:
    window = split([STEP_OF_100, *work])
    assert _microseconds(window) == {"products": 20, "other operators": 10, "idle": 70}
    assert {each.name: each.calls for each in window.operators} == {work[0]["name"]: 0, work[1]["name"]: 1}


def test_time_in_which_a_gpu_waits_for_data_does_not_count_as_idle() -> None:
    step, data = _mark(f"{trace.STEP}1", 0, 100), _mark(f"{trace.PHASE}data", 10, 40)
    window = split([step, data, _span("gemm", 30, 60, "kernel", 7)])
    assert _microseconds(window) == {"products": 30, "data": 20, "idle": 50}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "all_reduce"),
        ("gloo:scatter", "scatter"),
        ("c10d::send", "send and receive"),
    ],
)
def test_a_collective_is_recognized_by_the_longest_matching_keyword_in_its_name(name: str, kind: str) -> None:
    window = split([STEP_OF_100, _mark(name, 120, 150, thread=2)])
    assert _microseconds(window) == {kind: 30, "idle": 70}


def test_parts_that_were_neither_predicted_nor_measured_have_no_row() -> None:
    work = split([STEP_OF_100, _span("aten::mm", 100, 160)])
    window = Window(rank=0, first=1, last=1, split=work, memory=(), trace="t.json", snapshot=None)
    assert window.steps == "step 1"
    kinds = ["forward and backward", "of it products", "idle", "the whole step"]
    assert [kind for kind, _, _ in compare(window, None)] == kinds
    assert [milliseconds(seconds) for seconds in (0.9994, 1.0)] == ["999.4 ms", "1.00 s"]


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no annotated step"):
        split([_span("aten::mm", 0, 50)])


def test_memory_on_a_gpu_counts_from_the_total_and_on_a_cpu_from_the_window_start() -> None:
    def grown(at: float, size: int, total: int, device: int) -> Event:
        args = {"Device Type": device, "Bytes": size, "Total Allocated": total}
        return {"ph": "i", "name": "[memory]", "ts": at, "args": args}

    events = [grown(2, -50, 100, 1), grown(1, 50, 150, 1), grown(1, 30, 30, 0), grown(2, 20, 50, 0)]
    assert trace.allocated(events, gpu=True) == trace.Allocated(before=100, peak=150)
    assert trace.allocated(events, gpu=False) == trace.Allocated(before=0, peak=50)
    assert trace.allocated([], gpu=True) is None


def example() -> Window:
    seconds = {"products": 0.2, "attention": 0.1, "optimizer": 0.05, "all_gather": 0.03, "idle": 0.02}
    return Window(
        rank=0,
        first=3,
        last=5,
        split=Split(
            device="cuda",
            steps=3,
            step_seconds=0.4,
            seconds=tuple(seconds.items()),
            hidden=(("all_gather", 0.2),),
            operators=(Operator(name="aten::mm", seconds=0.2, calls=12),),
        ),
        memory=(("weights", 10),),
        trace="t.json.gz",
        snapshot=None,
    )


def test_kinds_that_are_predicted_together_are_compared_together() -> None:
    predicted = dataclasses.replace(
        plan(Job(model=find("llama-8b"), method="lora"), Target(kind="kubernetes", gpu="H100")).prediction,
        step_parts=(("forward and backward", 0.25), ("collectives, exposed", 0.05), ("optimizer", 0.04)),
        step_kernels=(("products", 0.15), ("attention", 0.06)),
    )
    assert compare(example(), predicted) == [
        ("forward and backward", 0.25, pytest.approx(0.3)),
        ("of it products", 0.15, 0.2),
        ("of it attention", 0.06, 0.1),
        ("collectives, exposed", 0.05, 0.03),
        ("of it all_gather", None, 0.03),
        ("optimizer", 0.04, 0.05),
        ("idle", None, 0.02),
        ("the whole step", pytest.approx(0.34), 0.4),
    ]
    assert compare(example(), None)[-1] == ("the whole step", None, 0.4)
    assert summary_lines(example(), predicted)[0] == (
        "profiled steps 3 to 5 on rank 0: 400.0 ms a step: products 200.0 ms (predicted 150.0 ms), "
        "attention 100.0 ms (predicted 60.0 ms), all_gather 30.0 ms, optimizer 50.0 ms (predicted 40.0 ms), "
        "idle 20.0 ms"
    )


def test_predicted_collectives_are_compared_with_exposed_plus_hidden_time() -> None:
    plain = plan(Job(model=find("llama-8b"), method="lora"), Target(kind="kubernetes", gpu="H100")).prediction
    predicted = dataclasses.replace(plain, step_collectives=(("all_gather", 0.25), ("reduce_scatter", 0.1)))
    reduced, gathered = collectives(example(), predicted)
    assert (gathered.kind, gathered.predicted, gathered.hidden) == ("all_gather", 0.25, 0.2)
    assert gathered.measured == pytest.approx(0.23)
    assert (reduced.kind, reduced.predicted, reduced.measured) == ("reduce_scatter", 0.1, None)
    assert [each.predicted for each in collectives(example(), None)] == [None]


def test_a_window_survives_json_and_a_trace_survives_gzip(tmp_path: Path) -> None:
    assert Window.from_dict(json.loads(json.dumps(example().to_dict()))) == example()
    trace = tmp_path / "t.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [STEP]}).encode()))
    assert read_trace(trace) == [STEP]
