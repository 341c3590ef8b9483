"""Every breach, planted once into the history of a good run, is found and named."""

import functools
import re
from collections.abc import Callable

import pytest
from attrs import evolve

from adapters.simulator.fleets import cold, group_of
from adapters.simulator.judge import Breach, Limits, judge
from adapters.simulator.run import run
from adapters.simulator.told import Handed, History, Verb, Wrote
from balancer.config import Config
from balancer.model import Lease, Position, Version

CONFIG = Config()
A, B = group_of(0, 2)
SETTLED = 80.0
LIMITS = Limits(lease_seconds={A: 10.0, B: 10.0}, settled=SETTLED, moves=(SETTLED, 0))


@functools.cache
def good() -> History:
    """Two workers start together, share four leases, and read."""
    fleet = cold(4, (A, B), CONFIG, seed=1, start="together", cycles=5)
    scenario = evolve(fleet.scenario, reading=True, full=True, calm=60.0, scan_per_cycle=True)
    return run(scenario)


def planted(*writes: Wrote, handed: tuple[Handed, ...] = ()) -> History:
    """The good history with this in it."""
    history = good()
    return evolve(
        history,
        writes=sorted([*history.writes, *writes], key=lambda write: write.t),
        handed=sorted([*history.handed, *handed], key=lambda batch: batch.t),
    )


def last(key: str, t: float, verbs: tuple[Verb, ...] = ("renew", "checkpoint", "claim")) -> Wrote:
    """The last write of a lease before then."""
    return [write for write in good().writes if write.key == key and write.t < t and write.verb in verbs][-1]


def other(write: Wrote) -> str:
    """The worker that did not write it."""
    return B if write.worker == A else A


def wrote(before: Lease | None, after: Lease | None, t: float, who: str, verb: Verb) -> Wrote:
    """A write of a second process."""
    return Wrote(t, t - 0.01, who, f"{who}#9", verb, after.key if after else "s-0", before, after, done=True)


def taken(verb: Verb, t: float, epoch: int = 1) -> Wrote:
    """The other worker takes a lease."""
    held = last("s-0", t)
    row = held.after
    assert row is not None
    after = evolve(row, owner=other(held), epoch=row.epoch + epoch, version=Version(str(row.epoch + epoch)))
    return wrote(row, after, t, other(held), verb)


def two_holders() -> History:
    """A claim of what was renewed a moment ago."""
    return planted(taken("claim", 50.0))


def counter() -> History:
    """A change of owner that the former owner may not notice."""
    return planted(taken("steal", 50.0, epoch=0))


def checkpoint_went_back() -> History:
    """A checkpoint below the one before."""
    row = last("s-0", 50.0).after
    assert row is not None
    return planted(wrote(row, evolve(row, checkpoint=Position("100")), 50.0, row.owner or "", "checkpoint"))


def held_by_nobody() -> History:
    """A lease let go, and never taken again."""
    row = good().writes[-1].after
    assert row is not None
    return planted(wrote(row, evolve(row, owner=None, epoch=row.epoch + 1), 90.0, row.owner or "", "release"))


def action_at_balance() -> History:
    """A refused theft among balanced workers."""
    return planted(evolve(taken("steal", 90.0), done=False))


def needless_move() -> History:
    """A theft among balanced workers that succeeds."""
    return planted(taken("steal", 90.0))


def uneven() -> History:
    """The same, and nothing after it."""
    return planted(taken("steal", good().end))


def lost() -> History:
    """A batch that is left out."""
    history = good()
    batches = [batch for batch in history.handed if batch.shard == "s-0"]
    return evolve(history, handed=[batch for batch in history.handed if batch != batches[5]])


def never_read() -> History:
    """Records that nobody hands over at the end."""
    history = good()
    return evolve(history, handed=[batch for batch in history.handed if batch.t < 55.0])


def out_of_order() -> History:
    """A child read before its parent was read to the end."""
    return evolve(good(), parents={**good().parents, "s-1": ("s-0",)})


def handed_over_again() -> History:
    """A record at or before the checkpoint its reader started from."""
    held = last("s-0", 50.0)
    theft = taken("steal", 50.0)
    return planted(theft, handed=(Handed(50.1, f"{other(held)}#9", "s-0", 100, 100),))


def handed_over_unheld() -> History:
    """A record handed over by a process that never held its shard."""
    held = last("s-0", 50.0)
    return planted(handed=(Handed(50.1, f"{other(held)}#9", "s-0", 101, 101),))


PLANTED: dict[str, Callable[[], History]] = {
    "two holders": two_holders,
    "counter": counter,
    "checkpoint went back": checkpoint_went_back,
    "held by nobody": held_by_nobody,
    "action at balance": action_at_balance,
    "needless move": needless_move,
    "uneven": uneven,
    "lost": lost,
    "out of order": out_of_order,
    "handed over again": handed_over_again,
    "handed over unheld": handed_over_unheld,
}


def test_a_good_run_has_no_breach() -> None:
    """Without it the planted ones would show nothing."""
    assert judge(good(), LIMITS) == ()


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_breach_is_named(what: str) -> None:
    """Without it the judge could be silent because it is blind."""
    named = [breach for breach in judge(PLANTED[what](), LIMITS) if breach.what == what]
    assert named
    for breach in named:  # what and when, and of which lease or worker
        assert str(breach).startswith(f"{what} at {breach.t:.3f} s: ")
        assert re.search(r"\b(s-\d|a-00\d)", breach.why)


def test_records_nobody_reads_at_the_end_are_lost() -> None:
    """Without it a shard whose reader stopped would look as good as any."""
    assert any(breach.what == "lost" and "nobody handed over" in breach.why for breach in judge(never_read(), LIMITS))


def test_a_breach_says_who_and_why() -> None:
    """Without it whoever reads "two holders" would have to find the two."""
    (breach,) = [each for each in judge(two_holders(), LIMITS) if each.what == "two holders"]
    held = last("s-0", 50.0)
    until = held.sent + 0.999 * 10
    right = f"{held.process} held until {until:.3f} by its {held.verb} of {held.sent:.3f}"
    assert breach == Breach("two holders", 50.0, f"{other(held)}#9 claimed s-0, which {right}")
