"""Options of the checklist flow, with some of them set."""

from __future__ import annotations

from typing import Any

from flows.cluster_check import launch as checklist_launch
from flows.cluster_check.launch import DEFAULTS, Launch, resolve

FLOOR = "system,op,floor,source\nhere,gemm_fp32,1000000,no processor is that fast\n"
"""Thresholds that no machine reaches."""


def values_with(**values: Any) -> dict[str, Any]:
    return {**DEFAULTS, **values}


def options_with(**values: Any) -> checklist_launch.FlowOptions:
    return checklist_launch.options_of(values_with(**values))


def run_config_with(**values: Any) -> checklist_launch.RunConfig:
    launch = Launch(backend="local", gpus_per_node=None, thresholds=None, thresholds_file="")
    return resolve(options_with(device="cpu", **values), launch, datastore="/")
