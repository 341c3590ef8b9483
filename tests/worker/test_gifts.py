"""What a worker remembers of its requests and hand-offs, call by call, even when the store fails."""

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
    """A worker's requests and gifts, and what it was notified of."""

    def __init__(self, me: str = "ann", lease_seconds: float = 10.0) -> None:
        self.store, self.clock = FaultyStore(), Clock()
        self.held: list[tuple[Lease, float]] = []
        self.doubted: list[Lease] = []
        self.handoffs = Handoffs(
            self.store,
            me,
            clock=self.clock,
            lease_seconds=lease_seconds,
            hold=lambda lease, begun: self.held.append((lease, begun)),
            doubt=self.doubted.append,
        )

    def owned(self, key: str = "s-0", owner: str = "ann") -> Lease:
        """Return a lease claimed by an owner that responds to requests."""
        self.store.write(CreateLease(Lease(key)))
        self.store.write(ClaimLease(self.store.row(key), owner))
        return self.store.row(key)

    def requested(self, key: str = "s-0", next_owner: str = "bob", owner: str = "ann") -> Lease:
        """Return such a lease with a next owner."""
        self.store.write(RequestLease(self.owned(key, owner), next_owner))
        return self.store.row(key)

    def handed_off(self, key: str = "s-0") -> Lease:
        """Return a lease that ann gave to bob, who does not accept it."""
        requested = self.requested(key)
        self.store.write(GiveLease(requested, requested.checkpoint))
        return self.store.row(key)


def test_unaccepted_handoff_is_taken_back_after_two_seconds() -> None:
    """The next owner has two seconds to accept. After that the lease would be unread for too long."""
    taker = Taker()
    gift = taker.handed_off()
    taker.handoffs.note_given(gift, 1000.0)
    taker.clock.now = 1001.9
    assert taker.handoffs.check_timeouts(1001.9) == 1002.15
    assert (taker.held, taker.store.row("s-0")) == ([], gift)
    taker.clock.now = 1002.0
    assert taker.handoffs.check_timeouts(1002.0) == math.inf
    assert taker.held == [(taker.store.row("s-0"), 1002.0)]
    assert taker.store.row("s-0").owner == "ann"
    # The gift is forgotten: the next owner's next write is not answered by another steal.
    assert taker.handoffs.check_timeouts(1100.0) == math.inf
    assert len(taker.held) == 1


def test_next_check_is_due_with_the_first_handoff() -> None:
    taker = Taker()
    taker.handoffs.note_given(taker.handed_off("s-0"), 1000.0)
    taker.handoffs.note_given(taker.handed_off("s-1"), 1001.0)
    assert taker.handoffs.check_timeouts(1000.5) == 1002.0
    assert taker.handoffs.check_timeouts(1002.5) == 1003.0
    assert [lease.key for lease, _ in taker.held] == ["s-0"]


def test_short_leases_wait_a_third_of_their_time_for_the_next_owner() -> None:
    """With a lease of 3 s the giver waits 1 s, so that it takes the lease back before it expires."""
    taker = Taker(lease_seconds=3.0)
    taker.handoffs.note_given(taker.handed_off(), 1000.0)
    assert taker.handoffs.check_timeouts(1000.5) == 1001.0


def test_many_handoffs_are_taken_back_concurrently() -> None:
    taker, batches = Taker(), list[int]()

    def each(function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        leases = list(items)
        batches.append(len(leases))
        return map(function, leases)

    for key in ("s-0", "s-1"):
        taker.handoffs.note_given(taker.handed_off(key), 1000.0)
    taker.handoffs.check_timeouts(1002.0, each)
    assert (batches, [lease.key for lease, _ in taker.held]) == ([2], ["s-0", "s-1"])


def test_unreachable_store_delays_taking_back_by_a_quarter_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taker = Taker()
    taker.handoffs.note_given(taker.handed_off(), 1000.0)
    taker.store.down = True
    assert taker.handoffs.check_timeouts(1002.0) == 1002.25
    assert (taker.held, taker.doubted) == ([], [])
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
    taker.store.down = False
    assert taker.handoffs.check_timeouts(1002.25) == math.inf
    assert [lease.owner for lease, _ in taker.held] == ["ann"]


def test_lease_taken_back_without_a_reply_is_unconfirmed() -> None:
    """The table may name us as the owner, but we do not know when the write was applied."""
    taker = Taker()
    taker.handoffs.note_given(taker.handed_off(), 1000.0)
    taker.store.lose_replies = 1
    assert taker.handoffs.check_timeouts(1002.0) == 1002.25
    assert taker.handoffs.check_timeouts(1002.25) == math.inf
    assert (taker.held, taker.doubted) == ([], [taker.store.row("s-0")])


def test_lease_accepted_in_time_stays_with_its_next_owner() -> None:
    taker = Taker()
    taker.handoffs.note_given(taker.handed_off(), 1000.0)
    taker.store.write(ClaimLease(taker.store.row("s-0"), "bob"))
    assert taker.handoffs.check_timeouts(1002.0) == math.inf
    assert (taker.held, taker.doubted, taker.store.row("s-0").owner) == ([], [], "bob")


def test_two_threads_may_take_back_the_same_lease() -> None:
    taker = Taker()
    taker.handoffs.note_given(taker.handed_off(), 1000.0)

    def pass_while_another_thread_is_faster() -> None:
        taker.store.passes = lambda: None
        taker.handoffs.check_timeouts(1002.0)

    taker.store.passes = pass_while_another_thread_is_faster
    assert taker.handoffs.check_timeouts(1002.0) == math.inf
    assert ([lease.owner for lease, _ in taker.held], taker.doubted) == (["ann"], [taker.store.row("s-0")])


def test_handoff_of_a_deleted_row_is_forgotten() -> None:
    taker = Taker()
    taker.handoffs.note_given(Lease("s-9", owner="bob"), 1000.0)
    assert taker.handoffs.check_timeouts(1002.0) == math.inf
    assert (taker.held, taker.doubted) == ([], [])


def test_only_leases_taken_back_are_requested_again() -> None:
    taker = Taker("bob")
    for key in ("s-0", "s-1"):
        taker.handoffs.note_request(taker.requested(key))
    back = [Lease(key, owner="ann", yields=True) for key in ("s-0", "s-1", "s-2")]
    assert taker.handoffs.repeated_requests(back) == (
        RequestHandoff(back[0], "ann", "H4"),
        RequestHandoff(back[1], "ann", "H4"),
    )
    # A pending request is not repeated, and a fulfilled one is over.
    assert taker.handoffs.repeated_requests([taker.store.row("s-0")]) == ()
    taker.handoffs.forget_request("s-0")
    taker.handoffs.forget_request("s-7")
    assert taker.handoffs.repeated_requests(back) == (RequestHandoff(back[1], "ann", "H4"),)


def test_leaving_worker_withdraws_and_forgets_its_requests() -> None:
    taker = Taker("bob")
    for key in ("s-0", "s-1"):
        taker.handoffs.note_request(taker.requested(key))
    taker.handoffs.withdraw()
    assert [taker.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert taker.handoffs.repeated_requests([Lease("s-0", owner="ann", yields=True)]) == ()
    count = len(taker.store.writes)
    taker.handoffs.withdraw()
    assert len(taker.store.writes) == count


def test_failed_withdrawal_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    taker = Taker("bob")
    for key in ("s-0", "s-1"):
        taker.handoffs.note_request(taker.requested(key))
    taker.store.write(StealLease(taker.store.row("s-0"), "cyd"))
    taker.store.lose_replies = 1
    taker.handoffs.withdraw()
    assert [taker.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
