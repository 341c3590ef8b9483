"""What a worker remembers of its requests and gifts, call by call, also when the store fails."""

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


def test_a_gift_is_taken_back_two_seconds_after_it_was_given_and_not_before() -> None:
    """Earlier, the lease would be taken from a next owner that is about to accept.

    Later, it would be unread too long.
    """
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


def test_the_next_call_is_due_when_the_first_gift_is() -> None:
    one = Taker()
    one.handoffs.note_given(one.given("s-0"), 1000.0)
    one.handoffs.note_given(one.given("s-1"), 1001.0)
    assert one.handoffs.check_timeouts(1000.5) == 1002.0
    assert one.handoffs.check_timeouts(1002.5) == 1003.0
    assert [lease.key for lease, _ in one.held] == ["s-0"]


def test_a_fleet_of_short_leases_waits_a_third_of_them_for_its_heirs() -> None:
    """With a lease of 3 s the giver waits 1 s, so that the gift does not expire first."""
    one = Taker(lease_seconds=3.0)
    one.handoffs.note_given(one.given(), 1000.0)
    assert one.handoffs.check_timeouts(1000.5) == 1001.0


def test_many_gifts_are_taken_back_by_the_map_that_is_given() -> None:
    """With a concurrent `map`, the writes do not wait for each other."""
    one, batches = Taker(), list[int]()

    def each(function: Callable[[T], R], items: Iterable[T], /) -> Iterable[R]:
        leases = list(items)
        batches.append(len(leases))
        return map(function, leases)

    for key in ("s-0", "s-1"):
        one.handoffs.note_given(one.given(key), 1000.0)
    one.handoffs.check_timeouts(1002.0, each)
    assert (batches, [lease.key for lease, _ in one.held]) == ([2], ["s-0", "s-1"])


def test_an_unreachable_store_leaves_the_gift_to_be_taken_back_a_quarter_of_a_second_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store that does not respond is not called without a pause, and the lease does not stay unread."""
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.down = True
    assert one.handoffs.check_timeouts(1002.0) == 1002.25
    assert (one.held, one.doubted) == ([], [])
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
    one.store.down = False
    assert one.handoffs.check_timeouts(1002.25) == math.inf
    assert [lease.owner for lease, _ in one.held] == ["ann"]


def test_a_gift_taken_back_whose_answer_was_lost_is_doubted_and_not_held_at_once() -> None:
    """The table may name us as the owner, but we do not know when the write was applied."""
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.lose_replies = 1
    assert one.handoffs.check_timeouts(1002.0) == 1002.25
    assert one.handoffs.check_timeouts(1002.25) == math.inf
    assert (one.held, one.doubted) == ([], [one.store.row("s-0")])


def test_a_gift_that_was_accepted_in_time_stays_with_its_heir() -> None:
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)
    one.store.write(ClaimLease(one.store.row("s-0"), "bob"))
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert (one.held, one.doubted, one.store.row("s-0").owner) == ([], [], "bob")


def test_two_threads_may_take_the_same_gift_back() -> None:
    """The slower thread does not fail, so its remaining renewals are written."""
    one = Taker()
    one.handoffs.note_given(one.given(), 1000.0)

    def pass_while_another_thread_is_faster() -> None:
        one.store.passes = lambda: None
        one.handoffs.check_timeouts(1002.0)

    one.store.passes = pass_while_another_thread_is_faster
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert ([lease.owner for lease, _ in one.held], one.doubted) == (["ann"], [one.store.row("s-0")])


def test_a_gift_whose_row_is_gone_is_forgotten() -> None:
    """A deleted row does not end the renewals of other leases by an error."""
    one = Taker()
    one.handoffs.note_given(Lease("s-9", owner="bob"), 1000.0)
    assert one.handoffs.check_timeouts(1002.0) == math.inf
    assert (one.held, one.doubted) == ([], [])


def test_a_request_is_made_again_for_each_lease_that_was_asked_for_and_no_other() -> None:
    """Only gifts that were taken back are requested again."""
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


def test_a_worker_that_leaves_takes_back_its_requests_and_forgets_them() -> None:
    """An owner does not drain a lease for a worker that has left."""
    one = Taker("bob")
    for key in ("s-0", "s-1"):
        one.handoffs.note_request(one.asked(key))
    one.handoffs.withdraw()
    assert [one.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert one.handoffs.repeated_requests([Lease("s-0", owner="ann", yields=True)]) == ()
    count = len(one.store.writes)
    one.handoffs.withdraw()
    assert len(one.store.writes) == count


def test_one_request_that_cannot_be_taken_back_keeps_no_other(caplog: pytest.LogCaptureFixture) -> None:
    one = Taker("bob")
    for key in ("s-0", "s-1"):
        one.handoffs.note_request(one.asked(key))
    one.store.write(StealLease(one.store.row("s-0"), "cyd"))
    one.store.lose_replies = 1
    one.handoffs.withdraw()
    assert [one.store.row(key).next_owner for key in ("s-0", "s-1")] == [None, None]
    assert [(record.levelname, "s-0" in record.getMessage()) for record in caplog.records] == [("WARNING", True)]
