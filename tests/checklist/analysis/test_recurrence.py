"""Recurrence over several nights: faults seen repeatedly are named, single sightings are not."""

from __future__ import annotations

from checklist.analysis.recurrence import NIGHTS, Sightings, count_nights, recurring

DAY = 86_400.0
ALL = ("a", "b", "c", "d")


def observations(*nights: tuple[tuple[str, ...], ...]) -> list[Sightings]:
    """Return one observation per night."""
    return [
        Sightings(unix=day * DAY, nodes=ALL, seen=observed_nodes) for day, observed_nodes in enumerate(nights)
    ]


def test_a_node_seen_on_three_nights_is_named_with_the_nights() -> None:
    (recurring_faults,) = recurring(observations((("a", "b"),), (), (("b", "c"),), (("b",),)))
    assert recurring_faults.names == ("b",)
    assert recurring_faults.nights == ("1970-01-01", "1970-01-03", "1970-01-04")
    assert recurring_faults.description == "on 3 of 4 nights (1970-01-01, 1970-01-03, 1970-01-04)"
    assert recurring_faults.enough


def test_two_nodes_always_seen_together_are_reported_as_a_link() -> None:
    (recurring_faults,) = recurring(observations((("a", "b"),), (("a", "b"),), (("a", "b"),)))
    assert recurring_faults.names == ("a", "b")


def test_two_nights_or_many_runs_of_one_night_are_not_a_recurrence() -> None:
    assert NIGHTS == 3
    assert recurring(observations((("a",),), (), (("a",),))) == ()
    hours = [Sightings(unix=3600.0 * hour, nodes=ALL, seen=(("a",),)) for hour in range(20)]
    assert recurring(hours) == ()


def test_two_recurring_faults_are_distinguished() -> None:
    both = recurring(observations(*[(("a",), ("c", "d"))] * 4))
    assert {one.names for one in both} == {("a",), ("c", "d")}


def test_a_sighting_counts_for_one_fault_only() -> None:
    recurring_faults = recurring(observations((("a", "b"),), (("a", "c"),), (("a", "d"),), (("b",),)))
    assert [one.names for one in recurring_faults] == [("a",)]


def test_the_frequency_counts_only_nights_that_observed_the_node() -> None:
    elsewhere = Sightings(unix=5 * DAY, nodes=("c", "d"))
    assert count_nights(("a",), [*observations((("a",),), ()), elsewhere]).looked == 2
