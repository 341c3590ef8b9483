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

    def asked(self, key: str = "s-0", next_owner: str = "bob", owner: str = "ann") -> Lease:
        """Return such a lease with a next owner."""
        self.store.write(RequestLease(self.owned(key, owner), next_owner))
        return self.store.row(key)

    def given(self, key: str = "s-0") -> Lease:
        """Return a lease that ann gave to bob, who does not accept it."""
        requested = self.asked(key)
        self.store.write(GiveLease(requested, requested.checkpoint))
        return self.store.row(key)


def test_unaccepted_handoff_is_taken_back_after_two_seconds() -> None:
    """The next owner has two seconds to accept. After that the lease would be unread for too long."""
    one = Taker()
    gift = one.given()
    one.handoffs.note_given(gift, 1000.0)
    one.clock.now = 1001.9
    assert one.handoffs.check_timeouts(1001.9) == 1002.15
    assert (one.held, one.store.row("s-0")) == ([], gift)
    one.clock.now = 1002.0
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert one.held == [(one.store.row("s-0"), 1002.0)]
    assert one.store.row("s-0").owner == "ann"
    # The gift is forgotten: the next owner's next write is not answered by another steal.
    assert one.handoffs.check_timeouts(1100.0) == math.inf
    assert len(one.held) == 1


def test_next_check_is_due_with_the_first_handoff() -> None:
    one = Taker()
    one.handoffs.note_given(one.given("s-0"), 1000.0)
    one.handoffs.note_given(one.given("s-1"), 1001.0)
    assert one.handoffs.check_timeouts(1000.5) == 1002.0
    assert one.handoffs.check_timeouts(1002.5) == 1003.0
    assert [lease.key for lease, _ in one.held] == ["s-0"]


def test_short_leases_wait_a_third_of_their_time_for_the_next_owner() -> None:
    """With a lease of 3 s the giver waits 1 s, so that it takes the lease back before it expires."""
    one = Taker(lease_seconds=3.0)
    one.handoffs.note_given(one.given(), 1000.0)
    assert one.handoffs.check_timeouts(1000.5) == 1001.0


def test_many_handoffs_are_taken_back_concurrently() -> None:
    one, batches = Taker(), list[int]()

    def each(function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        leases = list(items)
        batches.append(len(leases))
        return map(function, leases)

    for key in ("s-0", "s-1"):
        one.handoffs.note_given(one.given(key), 1000.0)
    one.handoffs.check_timeouts(1002.0, each)
    assert (batches, [lease.key for lease, _ in one.held]) == ([2], ["s-0", "s-1"])


def test_unreachable_store_delays_taking_back_by_a_quarter_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.down = True
    assert one.handoffs.check_timeouts(1002.0) == 1002.25
    assert (one.held, one.doubted) == ([], [])
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
    one.store.down = False
    assert one.handoffs.check_timeouts(1002.25) == math.inf
    assert [lease.owner for lease, _ in one.held] == ["ann"]


def test_lease_taken_back_without_a_reply_is_unconfirmed() -> None:
    """The table may name us as the owner, but we do not know when the write was applied."""
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.lose_replies = 1
    assert one.handoffs.check_timeouts(1002.0) == 1002.25
    assert one.handoffs.check_timeouts(1002.25) == math.inf
    assert (one.held, one.doubted) == ([], [one.store.row("s-0")])


def test_lease_accepted_in_time_stays_with_its_next_owner() -> None:
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.write(ClaimLease(one.store.row("s-0"), "bob"))
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert (one.held, one.doubted, one.store.row("s-0").owner) == ([], [], "bob")


def test_two_threads_may_take_back_the_same_lease() -> None:
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)

    def pass_while_another_thread_is_faster() -> None:
        one.store.passes = lambda: None
        one.handoffs.check_timeouts(1002.0)

    one.store.passes = pass_while_another_thread_is_faster
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert ([lease.owner for lease, _ in one.held], one.doubted) == (["ann"], [one.store.row("s-0")])


def test_handoff_of_a_deleted_row_is_forgotten() -> None:
    one = Taker()
    one.handoffs.note_given(Lease("s-9", owner="bob"), 1000.0)
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert (one.held, one.doubted) == ([], [])


def test_only_leases_taken_back_are_requested_again() -> None:
    one = Taker("bob")
    for key in ("s-0", "s-1"):
        one.handoffs.note_request(one.asked(key))
    back = [Lease(key, owner="ann", yields=True) for key in ("s-0", "s-1", "s-2")]
    assert one.handoffs.repeated_requests(back) == (
        RequestHandoff(back[0], "ann", "H4"),
        RequestHandoff(back[1], "ann", "H4"),
    )
    # A pending request is not repeated, and a fulfilled one is over.
    assert one.handoffs.repeated_requests([one.store.row("s-0")]) == ()
    one.handoffs.forget_request("s-0")
    one.handoffs.forget_request("s-7")
    assert one.handoffs.repeated_requests(back) == (RequestHandoff(back[1], "ann", "H4"),)


def test_leaving_worker_withdraws_and_forgets_its_requests() -> None:
    one = Taker("bob")
    for key in ("s-0", "s-1"):
        one.handoffs.note_request(one.asked(key))
    one.handoffs.withdraw()
    assert [one.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert one.handoffs.repeated_requests([Lease("s-0", owner="ann", yields=True)]) == ()
    count = len(one.store.writes)
    one.handoffs.withdraw()
    assert len(one.store.writes) == count


def test_failed_withdrawal_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    one = Taker("bob")
    for key in ("s-0", "s-1"):
        one.handoffs.note_request(one.asked(key))
    one.store.write(StealLease(one.store.row("s-0"), "cyd"))
    one.store.lose_replies = 1
    one.handoffs.withdraw()
    assert [one.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
