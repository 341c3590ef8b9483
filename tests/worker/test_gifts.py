"""What a worker remembers about its requests and hand-offs, even when the store fails."""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
from virtual_fleet import FaultyStore
from waiters import Clock

from leasehold.adapters.worker.handoffs import Handoffs
from leasehold.balancer.actions import RequestHandoff
from leasehold.balancer.model import Lease
from leasehold.stores.writes import ClaimLease, CreateLease, GiveLease, RequestLease, StealLease

T = TypeVar("T")
R = TypeVar("R")


class Taker:
    """The requests and hand-offs of a worker, and the leases that they made it hold or treat as unconfirmed."""

    def __init__(self, me: str = "ann", lease_seconds: float = 10.0) -> None:
        self.store, self.clock = FaultyStore(), Clock()
        self.held: list[tuple[Lease, float]] = []
        self.unconfirmed_leases: list[Lease] = []
        self.handoffs = Handoffs(
            self.store,
            me,
            clock=self.clock,
            lease_seconds=lease_seconds,
            hold_lease=lambda lease, begun: self.held.append((lease, begun)),
            mark_unconfirmed=self.unconfirmed_leases.append,
        )

    def owned(self, key: str = "s-0", owner: str = "ann") -> Lease:
        """Return a lease that `owner` has claimed."""
        self.store.write(CreateLease(Lease(key)))
        self.store.write(ClaimLease(self.store.row(key), owner))
        return self.store.row(key)

    def requested(self, key: str = "s-0", next_owner: str = "bob", owner: str = "ann") -> Lease:
        """Return a lease that `owner` has claimed and that `next_owner` has requested."""
        self.store.write(RequestLease(self.owned(key, owner), next_owner))
        return self.store.row(key)

    def handed_off(self, key: str = "s-0") -> Lease:
        """Return a lease that ann handed off to bob, and that bob has not accepted."""
        requested_row = self.requested(key)
        self.store.write(GiveLease(requested_row, requested_row.checkpoint))
        return self.store.row(key)


def test_unaccepted_handoff_is_taken_back_after_two_seconds() -> None:
    """The next owner has two seconds to accept, so that no shard remains unread for long if it fails to do so."""
    harness = Taker()
    given_row = harness.handed_off()
    harness.handoffs.note_given(given_row, 1000.0)
    harness.clock.now = 1001.9
    assert harness.handoffs.check_timeouts(1001.9) == 1002.15
    assert (harness.held, harness.store.row("s-0")) == ([], given_row)
    harness.clock.now = 1002.0
    assert harness.handoffs.check_timeouts(1002.0) == math.inf
    assert harness.held == [(harness.store.row("s-0"), 1002.0)]
    assert harness.store.row("s-0").owner == "ann"
    # The hand-off is forgotten, so a later write of the next owner does not cause another steal.
    assert harness.handoffs.check_timeouts(1100.0) == math.inf
    assert len(harness.held) == 1


def test_lease_taken_back_by_a_slow_write_counts_from_its_beginning() -> None:
    """Others may have read the written row at any time since, so the lease may expire that early."""
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off(), 1000.0)

    def write_slowly() -> None:
        harness.clock.now += 4.0

    harness.clock.now, harness.store.passes = 1002.0, write_slowly
    harness.handoffs.check_timeouts(1002.0)
    assert [write_began for _, write_began in harness.held] == [1002.0]


def test_next_check_is_due_with_the_first_handoff() -> None:
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off("s-0"), 1000.0)
    harness.handoffs.note_given(harness.handed_off("s-1"), 1001.0)
    assert harness.handoffs.check_timeouts(1000.5) == 1002.0
    assert harness.handoffs.check_timeouts(1002.5) == 1003.0
    assert [lease.key for lease, _ in harness.held] == ["s-0"]


def test_short_leases_wait_a_third_of_their_time_for_the_next_owner() -> None:
    """If leases last 3 s, the former owner waits 1 s and takes the lease back before it expires."""
    harness = Taker(lease_seconds=3.0)
    harness.handoffs.note_given(harness.handed_off(), 1000.0)
    assert harness.handoffs.check_timeouts(1000.5) == 1001.0


def test_many_handoffs_are_taken_back_concurrently() -> None:
    harness, batch_sizes = Taker(), list[int]()

    def map_and_count(function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        leases = list(items)
        batch_sizes.append(len(leases))
        return map(function, leases)

    for key in ("s-0", "s-1"):
        harness.handoffs.note_given(harness.handed_off(key), 1000.0)
    harness.handoffs.check_timeouts(1002.0, map_and_count)
    assert (batch_sizes, [lease.key for lease, _ in harness.held]) == ([2], ["s-0", "s-1"])


def test_unreachable_store_delays_taking_back_by_a_quarter_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off(), 1000.0)
    harness.store.down = True
    assert harness.handoffs.check_timeouts(1002.0) == 1002.25
    assert (harness.held, harness.unconfirmed_leases) == ([], [])
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
    harness.store.down = False
    assert harness.handoffs.check_timeouts(1002.25) == math.inf
    assert [lease.owner for lease, _ in harness.held] == ["ann"]


def test_lease_taken_back_without_a_reply_is_unconfirmed() -> None:
    """The table may name this worker as the owner, but the worker does not know when its write was applied."""
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off(), 1000.0)
    harness.store.lose_replies = 1
    assert harness.handoffs.check_timeouts(1002.0) == 1002.25
    assert harness.handoffs.check_timeouts(1002.25) == math.inf
    assert (harness.held, harness.unconfirmed_leases) == ([], [harness.store.row("s-0")])


def test_lease_accepted_in_time_stays_with_its_next_owner() -> None:
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off(), 1000.0)
    harness.store.write(ClaimLease(harness.store.row("s-0"), "bob"))
    assert harness.handoffs.check_timeouts(1002.0) == math.inf
    assert (harness.held, harness.unconfirmed_leases, harness.store.row("s-0").owner) == ([], [], "bob")


def test_two_threads_may_take_back_the_same_lease() -> None:
    harness = Taker()
    harness.handoffs.note_given(harness.handed_off(), 1000.0)

    def pass_while_another_thread_is_faster() -> None:
        harness.store.passes = lambda: None
        harness.handoffs.check_timeouts(1002.0)

    harness.store.passes = pass_while_another_thread_is_faster
    assert harness.handoffs.check_timeouts(1002.0) == math.inf
    assert ([lease.owner for lease, _ in harness.held], harness.unconfirmed_leases) == (
        ["ann"],
        [harness.store.row("s-0")],
    )


def test_handoff_of_a_deleted_row_is_forgotten() -> None:
    harness = Taker()
    harness.handoffs.note_given(Lease("s-9", owner="bob"), 1000.0)
    assert harness.handoffs.check_timeouts(1002.0) == math.inf
    assert (harness.held, harness.unconfirmed_leases) == ([], [])


def test_only_leases_taken_back_are_requested_again() -> None:
    harness = Taker("bob")
    for key in ("s-0", "s-1"):
        harness.handoffs.note_request(harness.requested(key))
    leases_taken_back = [Lease(key, owner="ann", yields=True) for key in ("s-0", "s-1", "s-2")]
    assert harness.handoffs.repeated_requests(leases_taken_back) == (
        RequestHandoff(leases_taken_back[0], "ann", "H4"),
        RequestHandoff(leases_taken_back[1], "ann", "H4"),
    )
    # A pending request is not repeated, and neither is a fulfilled one.
    assert harness.handoffs.repeated_requests([harness.store.row("s-0")]) == ()
    harness.handoffs.forget_request("s-0")
    harness.handoffs.forget_request("s-7")
    assert harness.handoffs.repeated_requests(leases_taken_back) == (RequestHandoff(leases_taken_back[1], "ann", "H4"),)


def test_leaving_worker_withdraws_and_forgets_its_requests() -> None:
    harness = Taker("bob")
    for key in ("s-0", "s-1"):
        harness.handoffs.note_request(harness.requested(key))
    harness.handoffs.withdraw()
    assert [harness.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert harness.handoffs.repeated_requests([Lease("s-0", owner="ann", yields=True)]) == ()
    write_count = len(harness.store.writes)
    harness.handoffs.withdraw()
    assert len(harness.store.writes) == write_count


def test_failed_withdrawal_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    harness = Taker("bob")
    for key in ("s-0", "s-1"):
        harness.handoffs.note_request(harness.requested(key))
    harness.store.write(StealLease(harness.store.row("s-0"), "cyd"))
    harness.store.lose_replies = 1
    harness.handoffs.withdraw()
    assert [harness.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
