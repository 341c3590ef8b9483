"""What the simulator says of fleets that start at one moment, and of stores that date their rows."""

from attrs import evolve

from adapters.simulator.question import Question, answer

CRASH = Question(40, (8,), kind="crash", cycles=4.0)


def test_few_of_a_crowd_choose_the_same_lease() -> None:
    """C15: without it 6 of these claims are refused."""
    assert answer(Question(100, (40,), start="together", cycles=2.0)).failed_writes <= 1


def test_where_rows_are_dated_one_scan_shows_a_death() -> None:
    """Without dates the first scan after a death shows rows that changed since the one before."""
    undated, dated = answer(CRASH), answer(evolve(CRASH, dated=True))
    assert undated.unowned_lease_cycles_max > dated.unowned_lease_cycles_max + 0.2
    assert dated.unowned_lease_cycles_max <= 1.62
    assert dated.claims == undated.claims == 5
