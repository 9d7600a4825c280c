"""Every finding says what to do, in a line or two that can be acted on."""

from __future__ import annotations

import string

import pytest

from checklist.judging.advice import finding, table


@pytest.mark.parametrize("code", table())
def test_every_advice_is_one_or_two_lines_that_fit_a_terminal(code: str) -> None:
    made = finding("mesh", code, "FAIL", "title", nodes=("node-1",))
    assert 1 <= len(made.advice) <= 2
    for line in (*made.advice, made.command or ""):
        assert len(line) <= 115, line
        assert "{" not in line.replace("{'vpc", "").replace("{{", "")
        assert "\n" not in line


@pytest.mark.parametrize("code", table())
def test_a_command_is_whole_or_shows_what_to_fill_in(code: str) -> None:
    command = finding("mesh", code, "FAIL", "title").command
    places = [name for _, name, _, _ in string.Formatter().parse(table()[code].command or "") if name]
    if command is not None:
        assert all(f"<{name.removesuffix('s') if name == 'nodes' else name}>" in command for name in places)


def test_a_finding_names_the_node_in_its_advice() -> None:
    made = finding("pairs", "slow-node", "FAIL", "node-7 is slow", nodes=("node-7",))
    assert "node-7" in made.advice[0]
    assert made.command == "kubectl drain node-7 --ignore-daemonsets --delete-emptydir-data"
