"""Blocks of slow links are recognized as an uplink."""

from __future__ import annotations

from itertools import combinations

from checklist.analysis.uplinks import uplinks

SIX = list(combinations(range(6), 2))


def test_slow_pairs_between_two_groups_are_their_uplink_even_without_labels() -> None:
    slow = [(a, b) for a, b in SIX if a % 2 != b % 2]
    assert uplinks(slow, SIX) == ((0, 2, 4), (1, 3, 5))
    assert uplinks([(b, a) for a, b in slow], SIX) == ((0, 2, 4), (1, 3, 5))


def test_three_leaves_with_slow_paths_between_them_are_three_groups() -> None:
    slow = [(a, b) for a, b in SIX if a // 2 != b // 2]
    assert uplinks(slow, SIX) == ((0, 1), (2, 3), (4, 5))


def test_unrelated_slow_links_are_not_an_uplink() -> None:
    assert uplinks([(0, 1), (2, 3)], SIX) == ()
    assert uplinks([(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)], SIX) == (), "that is the node"
    slow = [(a, b) for a, b in SIX if a % 2 != b % 2]
    assert uplinks(slow[1:], SIX) == (), "one of the paths is well"
    assert uplinks([*slow, (0, 2)], SIX) == (), "one within a group is slow, too"


def test_unmeasured_pairs_are_ignored() -> None:
    slow = [(0, 1), (0, 3), (2, 1), (2, 3)]
    measured = [*slow, (0, 2), (1, 3)]
    assert uplinks(slow, measured) == ((0, 2), (1, 3))
