"""Help page of the checklist."""

from __future__ import annotations

import re

import pytest

from checklist.option_help import RARE, help_page
from checklist.options import CommandOptions, flags
from estimator.cli.help import WIDTH
from flows.cluster_check.flow_options import check_help
from flows.cluster_check.launch import FlowOptions


@pytest.mark.parametrize("options", [CommandOptions, FlowOptions])
def test_the_page_lists_every_option_once(options: type[CommandOptions | FlowOptions]) -> None:
    page = help_page("checklist [OPTIONS]", options, example="checklist --nodes 2")
    listed = re.findall(r"^  --(\S+)", page, re.MULTILINE)
    assert sorted(listed) == sorted(name.replace("_", "-") for name in flags(options))
    assert max(map(len, page.splitlines())) <= WIDTH


def test_options_of_metaflow_are_shown_only_if_all_are_requested() -> None:
    assert "--max-workers" not in check_help("finetune check")
    page = check_help("finetune check", everything=True)
    assert "--max-workers" in page
    assert page.count("\n  --with ") == 1


def test_the_page_of_the_flow_leaves_rare_options_to_the_page_with_all_options() -> None:
    page, everything = check_help("finetune check"), check_help("finetune check", everything=True)
    assert len(page.splitlines()) < 60
    shown, all_shown = (set(re.findall(r"^  --(\S+)", text, re.MULTILINE)) for text in (page, everything))
    rare = {name.replace("_", "-") for name in RARE}
    assert rare <= all_shown
    assert not rare & shown
