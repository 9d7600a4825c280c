"""Every finding has one or two lines of actionable advice."""

from __future__ import annotations

import string

from checklist.judging.advice import finding, table


def test_a_finding_names_the_node_in_its_advice() -> None:
    sample = finding("pairs", "slow-node", "FAIL", "node-7 is slow", nodes=("node-7",))
    assert "node-7" in sample.advice[0]
    assert sample.command == "kubectl drain node-7 --ignore-daemonsets --delete-emptydir-data"


def test_every_advice_fits_a_terminal_and_commands_mark_their_placeholders() -> None:
    for code, advice in table().items():
        sample = finding("mesh", code, "FAIL", "title", nodes=("node-1",))
        assert 1 <= len(sample.advice) <= 2, code
        for line in (*sample.advice, sample.command or ""):
            assert len(line) <= 115, line
            assert "{" not in line.replace("{'vpc", "").replace("{{", ""), line
            assert "\n" not in line
        command = finding("mesh", code, "FAIL", "title").command or ""
        places = [name for _, name, _, _ in string.Formatter().parse(advice.command or "") if name]
        assert all(f"<{name.removesuffix('s') if name == 'nodes' else name}>" in command for name in places)
