"""The table of ``finetune rightsize``."""

from __future__ import annotations

from estimator import terminal
from estimator.rightsizing.report import StepReport
from estimator.rightsizing.usage import Sizes
from flows.commands import rightsize

SIZES = Sizes(cpu=2, memory_mib=2652, gpus=1, gpu_type="A100 SXM 80GB")
REPORT = StepReport(
    flow="MyTrainingFlow",
    step="preprocess",
    tasks=2,
    out_of_memory=0,
    hours=1e-5,
    requested=SIZES,
    used=SIZES,
    next_request=SIZES,
    usd=1e-6,
    wasted_usd=5.1e-7,
)


def table(report: StepReport) -> str:
    console = terminal.console(width=80)
    with console.capture() as captured:
        console.print(rightsize._table([report]))
    return captured.get()


def test_the_wasted_cost_is_whole_in_80_columns() -> None:
    assert "$0.00000051" in table(REPORT)
