"""Command line of a fine-tuning flow. Planning is imported only where a run is launched, not in its tasks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from decorators._metaflow import Backend
from estimator.plan import Plan
from flows.commands import flow_main, run_help
from flows.finetune import flags
from launchers.settings.options import translate


def plan_from_parameters(params: Mapping[str, Any], backend: Backend) -> Plan:
    """Plan the run that these parameters describe; see flows/finetune/planning.py."""
    from flows.finetune import planning  # planner and backends take a third of the flow's import time

    return planning.plan_from_parameters(params, backend)


def run_flow(flow: type[Any]) -> None:
    """Run the command line of a fine-tuning flow, whose ``run`` has an option for each setting."""
    flags.original_arguments[:] = sys.argv[1:]
    rejection = hasattr(flow, "score_option")
    flow_main.run_flow(
        flow,
        help_page=lambda name, everything: run_help.help_page(
            name, everything=everything, rejection=rejection
        ),
        translate=translate,
    )
