"""The section of a profiled window on the card."""

from __future__ import annotations

import dataclasses

from decorators.card.blocks import MAY_BREAK, Chart, Grid, Log, Text
from decorators.card.window import window_blocks
from tests.decorators.backends.plans import planned
from tests.launchers.report.test_window import example


def test_the_measured_parts_of_a_step_are_shown_next_to_the_prediction() -> None:
    plan = planned("llama-8b", "lora", "H100", 1)
    assert plan.prediction.step_parts, "speed is known"
    blocks = window_blocks(example(), plan)
    kinds, moved, operators = (block for block in blocks if isinstance(block, Grid))
    rows = {row[0]: row[1:] for row in kinds.rows}
    assert rows["forward and backward"][0].endswith(("ms", "s"))
    assert rows["forward and backward"][1:] == ("300.0 ms", "75.0%")
    assert rows["of it products"][0].endswith(("ms", "s"))
    assert rows["of it products"][1:] == ("200.0 ms", "50.0%")
    ((name, *figures),) = operators.rows
    assert (name.replace(MAY_BREAK, ""), *figures) == ("aten::mm", "200.0 ms", "50.0%", "12")
    text = "\n".join(block.markdown for block in blocks if isinstance(block, Text))
    assert "Profiled: steps 3 to 5, rank 0" in text
    assert moved.headers == ("a step", "measured", "hidden"), "of one GPU none is predicted"
    assert moved.rows == ((f"all_{MAY_BREAK}gather", "230.0 ms", "200.0 ms"),)
    assert "t.json.gz" in [block.text for block in blocks if isinstance(block, Log)], "to be copied as it is"
    assert [block for block in blocks if isinstance(block, Chart)]


def test_the_measured_parts_of_a_step_are_shown_without_a_plan() -> None:
    window = dataclasses.replace(example(), snapshot="m.pickle")
    blocks = window_blocks(window, None)
    kinds = next(block for block in blocks if isinstance(block, Grid))
    assert kinds.headers == ("a step", "measured", "share")
    assert ("of it products", "200.0 ms", "50.0%") in kinds.rows
    assert "m.pickle" in [block.text for block in blocks if isinstance(block, Log)]
