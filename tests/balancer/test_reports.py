"""Tests which led workers count as alive, according to their reports (M14)."""

import math

from leasehold.balancer.model import SHARD_END, Lease
from leasehold.balancer.watch import Reports, WorkerReports

J, K = Lease("s-1", owner="j"), Lease("s-2", owner="k")


def reported(**stamps: str) -> Reports:
    """Return the reports of the leader j and of other workers."""
    return Reports("j", tuple(sorted(stamps.items())))


def test_reporters_count_as_alive_from_their_next_report() -> None:
    """A new reporter counts as alive immediately. One that had reported before counts from its next report on."""
    reports = WorkerReports().after(reported(j="1"), (), ended=1)
    assert reports.led(began=5) == ()
    reports = reports.after(reported(j="2", k="1"), (), ended=10)
    assert reports.led(began=14) == (("j", 4), ("k", 4))


def test_worker_without_leases_counts_as_alive_from_its_next_report() -> None:
    """A worker that lost its leases counts as alive only after another report, because it may have been killed."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    reports = reports.after(reported(j="1", k="2"), (J,), ended=9)
    assert [worker for worker, _ in reports.led(began=10)] == ["j"]
    reports = reports.after(reported(j="1", k="3"), (J,), ended=20)
    assert reports.led(began=21) == (("j", 20), ("k", 1))


def test_no_lease_is_given_while_a_left_workers_report_is_recent() -> None:
    """No lease is released for led workers while the leader may still count a worker that has left as alive."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    reports = reports.after(reported(j="1", k="1"), (J,), ended=9)
    assert reports.led(began=35) == (("j", math.inf),)
    reports = reports.after(reported(j="2", k="1"), (J,), ended=59)
    assert reports.led(began=60) == (("j", math.inf),)
    assert reports.led(began=61) == (("j", 0),)
    assert reports.led(began=64) == (("j", 3),)


def test_no_lease_is_given_after_a_missed_report() -> None:
    """A worker that had no lease when it stopped looks alive until its next report is due."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (), ended=1)
    reports = reports.after(reported(j="2", k="1"), (), ended=31)
    assert reports.led(began=36) == (("j", 35), ("k", 35))
    assert reports.led(began=37) == (("j", math.inf),)
    assert reports.led(began=62) == (("j", math.inf),)
    assert reports.after(reported(j="3", k="1"), (), ended=62).led(began=63) == (("j", 2),)


def test_no_lease_is_given_to_a_joiner_that_may_have_ended() -> None:
    """While a joiner waits for a lease, it may have ended. Then no lease is released for it."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    reports = reports.after(reported(j="1", k="1"), (J,), ended=9)
    reports = reports.after(reported(j="2", k="1", n="1"), (J,), ended=40)
    assert reports.led(began=62) == (("j", math.inf), ("n", math.inf))
    reports = reports.after(reported(j="3", k="1", n="2"), (J,), ended=70)
    assert reports.led(began=71) == (("j", 10), ("n", 10))


def test_no_lease_is_given_before_all_workers_without_leases_have_reported() -> None:
    """A joiner gets a lease only after all workers without leases have reported, because one of them may have ended."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J,), ended=1)
    reports = reports.after(reported(j="1", k="1", n="1"), (J,), ended=20)
    assert reports.led(began=21) == (("j", math.inf), ("k", math.inf), ("n", math.inf))
    reports = reports.after(reported(j="1", k="2", n="1"), (J,), ended=31)
    assert reports.led(began=32) == (("j", 31), ("k", 31), ("n", 12))


def test_waiting_starts_again_with_each_lease_given() -> None:
    """The wait for workers continues as long as their leader gives them leases."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1"), (), ended=1)
    reports = reports.after(reported(j="1"), (J,), ended=9)
    assert reports.led(began=10) == (("j", 1),)
    reports = reports.after(reported(j="1"), (J, Lease("s-2")), ended=12)
    assert reports.led(began=13) == (("j", 4),)


def test_no_worker_is_led_without_a_leader() -> None:
    """No lease is released for led workers if their leader is silent or gone."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (), ended=1)
    assert reports.after(Reports(None, (("k", "2"),)), (), ended=9).led(began=10) == ()
    reports = reports.after(reported(j="1", k="2"), (), ended=30)
    assert reports.led(began=36) == (("j", 35), ("k", 35))
    assert reports.led(began=37) == ()


def test_ended_leases_do_not_count() -> None:
    ended_lease = Lease("s-1", owner="j", checkpoint=SHARD_END)
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1"), (J,), ended=1)
    assert reports.after(reported(j="1"), (ended_lease,), ended=9).led(began=10) == ()


def test_silence_counts_from_the_last_report() -> None:
    """A worker is given up a minute after its last report, not after its first, because its leader does the same."""
    reports = WorkerReports().after(reported(), (), ended=0).after(reported(j="1", k="1"), (J, K), ended=1)
    reports = reports.after(reported(j="1", k="2"), (J, K), ended=31)
    reports = reports.after(reported(j="2", k="2"), (J,), ended=60)
    assert [reports.led(began) for began in (90, 91)] == [(("j", math.inf),), (("j", 0),)]
