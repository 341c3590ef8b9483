"""Which led workers count as alive according to their reports (M14)."""

import math

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.balancer.watch import Reports, WorkerReports

J, K = Lease("s-1", owner="j"), Lease("s-2", owner="k")


def reported(**stamps: str) -> Reports:
    """Return the reports of the leader j and of other workers."""
    return Reports("j", tuple(sorted(stamps.items())))


def test_reporters_count_as_alive_from_their_next_report() -> None:
    """A new reporter counts as alive immediately, and one with an earlier report from its next report on."""
    roll = WorkerReports().after(reported(j="1"), (), ended=1)
    assert roll.led(began=5) == ()
    roll = roll.after(reported(j="2", k="1"), (), ended=10)
    assert roll.led(began=14) == (("j", 4), ("k", 4))


def test_worker_without_leases_counts_as_alive_from_its_next_report() -> None:
    """A worker that lost its leases counts as alive only after another report, because it may have been killed."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    roll = roll.after(reported(j="1", k="2"), (J,), ended=9)
    assert [worker for worker, _ in roll.led(began=10)] == ["j"]
    roll = roll.after(reported(j="1", k="3"), (J,), ended=20)
    assert roll.led(began=21) == (("j", 20), ("k", 1))


def test_no_lease_is_given_while_a_left_workers_report_is_recent() -> None:
    """No lease is released for led workers while the leader may still count a worker that has left as alive."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    roll = roll.after(reported(j="1", k="1"), (J,), ended=9)
    assert roll.led(began=35) == (("j", math.inf),)
    roll = roll.after(reported(j="2", k="1"), (J,), ended=59)
    assert roll.led(began=60) == (("j", math.inf),)
    assert roll.led(began=61) == (("j", 0),)
    assert roll.led(began=64) == (("j", 3),)


def test_no_lease_is_given_after_a_missed_report() -> None:
    """A worker that had no lease when it stopped looks alive until its next report is due."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (), ended=1)
    roll = roll.after(reported(j="2", k="1"), (), ended=31)
    assert roll.led(began=36) == (("j", 35), ("k", 35))
    assert roll.led(began=37) == (("j", math.inf),)
    assert roll.led(began=62) == (("j", math.inf),)
    assert roll.after(reported(j="3", k="1"), (), ended=62).led(began=63) == (("j", 2),)


def test_no_lease_is_given_to_a_joiner_that_may_have_ended() -> None:
    """A joiner that may have ended while it waited gets no lease."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    roll = roll.after(reported(j="1", k="1"), (J,), ended=9)
    roll = roll.after(reported(j="2", k="1", n="1"), (J,), ended=40)
    assert roll.led(began=62) == (("j", math.inf), ("n", math.inf))
    roll = roll.after(reported(j="3", k="1", n="2"), (J,), ended=70)
    assert roll.led(began=71) == (("j", 10), ("n", 10))


def test_no_lease_is_given_before_all_workers_without_leases_have_reported() -> None:
    """A joiner gets a lease only after all workers without leases have reported, because one of them may have ended."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J,), ended=1)
    roll = roll.after(reported(j="1", k="1", n="1"), (J,), ended=20)
    assert roll.led(began=21) == (("j", math.inf), ("k", math.inf), ("n", math.inf))
    roll = roll.after(reported(j="1", k="2", n="1"), (J,), ended=31)
    assert roll.led(began=32) == (("j", 31), ("k", 31), ("n", 12))


def test_waiting_starts_again_with_each_lease_given() -> None:
    """The wait for workers continues as long as their leader gives them leases."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1"), (), ended=1)
    roll = roll.after(reported(j="1"), (J,), ended=9)
    assert roll.led(began=10) == (("j", 1),)
    roll = roll.after(reported(j="1"), (J, Lease("s-2")), ended=12)
    assert roll.led(began=13) == (("j", 4),)


def test_no_worker_is_led_without_a_leader() -> None:
    """No lease is released for led workers if their leader is silent or gone."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (), ended=1)
    assert roll.after(Reports(None, (("k", "2"),)), (), ended=9).led(began=10) == ()
    roll = roll.after(reported(j="1", k="2"), (), ended=30)
    assert roll.led(began=36) == (("j", 35), ("k", 35))
    assert roll.led(began=37) == ()


def test_ended_leases_do_not_count() -> None:
    over = Lease("s-1", owner="j", checkpoint=SHARD_END)
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1"), (J,), ended=1)
    assert roll.after(reported(j="1"), (over,), ended=9).led(began=10) == ()


def test_silence_counts_from_the_last_report() -> None:
    """Counted from the first report, the minute would end before the leader gives up a worker that reported since."""
    roll = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    roll = roll.after(reported(j="1", k="2"), (J, K), ended=31)
    roll = roll.after(reported(j="2", k="2"), (J,), ended=60)
    assert [roll.led(began) for began in (90, 91)] == [(("j", math.inf),), (("j", 0),)]
