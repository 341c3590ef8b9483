"""The leases of one worker: which ones it gives up, and when it may take them or others again."""

from threading import Lock

import pytest
from attrs import evolve
from virtual_fleet import FaultyStore
from waiters import Clock

from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.annotations import Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.lease_book import LeaseBook, LeaseEvents
from leasehold.balancer.actions import Action, Claim
from leasehold.balancer.config import Config
from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import SHARD_END, Lease, Version
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError, WorkerError
from leasehold.stores.writes import ClaimLease, CreateLease

CONFIG = Config(lease_seconds=10.0)
EMPTY = Batch((), None, 0.0, 1.0)


class Book:
    """The leases of process p-1 of worker ann, and the events that its worker was told."""

    def __init__(self) -> None:
        self.store, self.clock = FaultyStore(), Clock()
        self.taken, self.released = list[str](), list[str]()
        events = LeaseEvents(
            lease_taken=lambda holding: self.taken.append(holding.key),
            lease_given=lambda _now: None,
            lease_taken_back=lambda: None,
            lease_gone=lambda _holding: None,
            row_recreated=lambda _description: None,
            release=lambda holding: self.released.append(holding.key),
        )
        identity = Identity("ann", "p-1")
        self.book = LeaseBook(self.store, identity, CONFIG, events, clock=self.clock, lock=Lock)
        self.holdings = self.book.holdings

    def own(self, key: str = "s-0", process: str = "p-1") -> Lease:
        """Return a row that names this process of ann as its owner."""
        self.store.write(CreateLease(Lease(key)))
        self.store.write(ClaimLease(self.store.row(key), "ann", (("process", f"{process}/ann"),)))
        return self.store.row(key)

    def take(self, key: str = "s-0") -> Holding:
        self.holdings.hold(self.own(key), self.clock.now)
        holding = self.holdings.get(key)
        assert holding is not None
        return holding

    def look(self, now: float, *rows: Lease) -> None:
        """Release what is silent at this time, as after a full read of the table."""
        self.clock.now = now
        self.book.release_silent_leases(rows, now, map)

    def may_claim(self, key: str, now: float) -> bool:
        """Return whether a lease may be claimed that no other worker has taken for long."""
        claims: tuple[Action, ...] = (Claim(Lease(key, idle=100.0), "M5"),)
        return self.book.without_excluded(claims, now) == claims


def test_silent_shard_is_released_to_the_chosen_worker_and_left_to_others() -> None:
    """The row shows that the lease was put aside, and other workers have the first chance for one lease time."""
    book = Book()
    reader, silent = book.take("s-0"), book.take("s-1")
    for holding in (reader, silent):
        holding.progress.call_began(1000.0)
        holding.progress.read(EMPTY, 1001.0)
    silent.progress.call_began(1010.0)
    silent.progress.failed("no response", 1010.0)
    reader.progress.call_began(1019.0)
    reader.progress.read(EMPTY, 1019.0)
    book.look(1020.0, Lease("s-2", owner="bob", yields=True))
    assert (book.released, silent.releasing, silent.progress.aside, reader.releasing) == (["s-1"], True, True, False)
    assert silent.release()
    assert book.store.row("s-1").owner == "bob"
    assert [book.may_claim("s-1", now) for now in (1029.9, 1030.0)] == [False, True]


def test_reader_that_waits_for_a_silent_stream_does_not_delay_the_release() -> None:
    """The present call may be recent, because earlier calls have timed out."""
    book = Book()
    holding = book.take()
    holding.progress.call_began(1000.0)
    holding.progress.call_returned()
    holding.progress.call_began(1028.0)
    book.look(1030.0)
    assert (holding.why, holding.progress.call_abandoned, book.store.row("s-0").owner) == ("released", True, None)


def test_lease_is_not_taken_again_while_its_former_reader_waits_in_a_call() -> None:
    book = Book()
    holding = book.take()
    holding.progress.call_began(1000.0)
    book.look(1030.0)
    assert holding.why == "released"
    book.look(1100.0)
    pause_end = 1100.0 + CONFIG.cycle_seconds + CONFIG.lease_seconds
    assert [book.may_claim("s-0", now) for now in (pause_end - 0.1, pause_end)] == [False, True]
    book.look(1200.0)
    assert not book.may_claim("s-0", 1201.0)
    holding.progress.call_returned()
    book.look(1300.0)
    assert book.may_claim("s-0", 1301.0)


def test_only_leases_being_given_up_are_released_from_under_their_readers() -> None:
    """A reader that is merely slow is waited for until the limit, and a lease that stays is not touched at all."""
    book = Book()
    leaving, staying = book.take("s-0"), book.take("s-1")
    for holding in (leaving, staying):
        holding.progress.call_began(1000.0)
    leaving.ask_release()
    book.book.leave_stuck(1009.9, 10.0, map)
    assert (leaving.lost.is_set(), leaving.progress.call_abandoned) == (False, False)
    book.book.leave_stuck(1010.0, 10.0, map)
    assert (leaving.why, staying.lost.is_set(), staying.progress.call_abandoned) == ("released", False, False)


def test_lease_that_was_taken_is_no_longer_requested() -> None:
    book = Book()
    book.book.handoffs.note_request(Lease("s-0", owner="bob", next_owner="ann"))
    book.take("s-0")
    assert book.book.handoffs.repeated_requests([Lease("s-0", owner="bob", yields=True)]) == ()


@pytest.mark.parametrize("held", [True, False])
def test_lease_of_a_later_stream_is_not_left_alone(*, held: bool) -> None:
    book = Book()
    book.store.write(CreateLease(Lease("s-0", owner="ann", annotations=((INCARNATION, "listed:1"),))))
    book.holdings.hold(book.store.row("s-0"), 1000.0)
    if not held:
        book.holdings.all[0].drop("lost")
    book.book.leave_alone("s-0", 60.0)
    claims: tuple[Action, ...] = tuple(
        Claim(Lease("s-0", annotations=((INCARNATION, name),)), "M5") for name in ("listed:1", "listed:2")
    )
    assert book.book.without_excluded(claims, 1001.0) == claims[1:]


def test_finished_lease_gets_no_reader() -> None:
    book = Book()
    book.holdings.hold(Lease("s-0", owner="ann", checkpoint=SHARD_END), 1000.0)
    assert ([holding.key for holding in book.holdings.all], book.taken) == (["s-0"], [])


def test_lease_that_is_held_meanwhile_is_no_longer_unconfirmed() -> None:
    book = Book()
    book.holdings.mark_unconfirmed(book.own())
    assert [lease.key for lease in book.holdings.unconfirmed] == ["s-0"]
    book.holdings.hold(book.store.row("s-0"), 1000.0)
    assert book.holdings.unconfirmed == ()


@pytest.mark.parametrize("was_claim", [True, False])
def test_only_claims_without_a_response_are_repeated(*, was_claim: bool) -> None:
    book = Book()
    book.holdings.note_failed_take(OutcomeUnknown("no response"), Lease("s-0"), 1000.0, was_claim=was_claim)
    assert len(book.holdings.unconfirmed) == was_claim
    book.holdings.note_read([Lease("s-0", owner="bob")])
    assert book.holdings.unconfirmed == ()


@pytest.mark.parametrize(("responds", "paused"), [(False, True), (True, False)])
def test_pause_follows_two_takes_without_a_response_in_between(*, responds: bool, paused: bool) -> None:
    """The pause lasts until another worker can have taken the leases. A response ends the count of failures."""
    book = Book()
    fault = OutcomeUnknown("no response")
    book.holdings.note_failed_take(fault, Lease("s-0"), 1000.0, was_claim=True)
    if responds:
        book.holdings.note_response()
    book.clock.now = 2000.0
    book.holdings.note_failed_take(fault, Lease("s-1"), 2000.0, was_claim=True)
    assert book.holdings.takes_paused is paused
    rest_seconds = CONFIG.rules.expires_above(CONFIG.lease_seconds) + 2 * CONFIG.cycle_seconds
    book.clock.now += rest_seconds - 0.1
    assert book.holdings.takes_paused is paused
    book.clock.now += 0.1
    assert not book.holdings.takes_paused


@pytest.mark.parametrize("fault", [NotWritten("full"), StoreError("forbidden")])
def test_failed_take_hurries_only_the_next_look(fault: StoreError) -> None:
    book = Book()
    book.holdings.note_failed_take(fault, Lease("s-0"), 1000.0, was_claim=True)
    assert book.holdings.take_failed
    book.holdings.note_read([])
    assert not book.holdings.take_failed


def test_lease_of_a_successor_is_adopted_once_it_was_not_renewed_for_a_lease_time() -> None:
    book = Book()
    book.take().drop("lost")
    row = Lease("s-0", owner="ann", annotations=(("process", "p-2/ann"),))
    rows = [evolve(row, idle=idle) for idle in (10.0, 10.1)]
    assert [book.holdings.adoptable([lease], include_ended=False) for lease in rows] == [(), (rows[1],)]


def test_process_that_renews_during_our_claims_is_alive() -> None:
    """The row changes between two claims, so another living process writes it."""
    book = Book()
    row, versions = book.own(process="p-2"), iter(range(100, 200))

    def renew() -> None:
        book.store.rewrite("s-0", lambda lease: evolve(lease, version=Version(str(next(versions)))))

    book.store.passes = renew
    assert book.holdings.readopt(row) is None
    with pytest.raises(WorkerError, match="is used by another living process"):
        book.holdings.check_identity()
    assert book.holdings.all == ()


def test_adopted_lease_counts_from_the_start_of_its_claim() -> None:
    """Other workers may measure the lease from any moment since then."""
    book = Book()
    row = book.own()

    def write_slowly() -> None:
        book.clock.now += 4.0

    book.store.passes = write_slowly
    assert book.holdings.readopt(row) is None
    assert [(holding.confirmed_at, book.clock.now) for holding in book.holdings.all] == [(1000.0, 1008.0)]
