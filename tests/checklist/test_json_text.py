"""Records as JSON text: one line per flat record, without default values."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from checklist import json_text
from checklist.measurements import Local, Measurements, Phase, record

RUN = Measurements(
    started_unix=0.0,
    seconds=1.5,
    profile="quick",
    device="cpu",
    backend="gloo",
    nodes_asked=1,
    gpus_per_node_asked=2,
    locals=(
        Local(rank=0, what="gemm_fp32", value=0.2, unit="TFLOPS"),
        Local(rank=1, what="gemm_fp32", value=None, unit="TFLOPS", error='"no" memory'),
    ),
    phases=(Phase(name="node", status="done", seconds=0.0),),
)


def test_measurements_are_read_back_unchanged() -> None:
    assert record(Measurements, json.loads(json_text.text(RUN))) == RUN


def test_each_flat_record_is_one_line_without_default_values() -> None:
    lines = json_text.text(RUN).splitlines()
    assert '  {"rank": 0, "what": "gemm_fp32", "value": 0.2, "unit": "TFLOPS"},' in lines
    assert '  {"name": "node", "status": "done"}' in lines
    assert lines[1] == ' "version": 2,'


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        json_text.text(dataclasses.replace(RUN, seconds=math.nan))
