"""Once a request has succeeded, a later rejection, as with refreshed tokens, is retried and does not end the worker."""

import pytest
from virtual_fleet import DrivenWorker, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.balancer.contradictions import INCARNATION
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.writes import CreateLease
from leasehold_lab.simulator.world.world import ListSource

REFUSED = StoreError("leases: AccessDeniedException: 403")
ALL = ["s-0", "s-1", "s-2", "s-3"]


class SelectiveListSource(ListSource):
    """A source that rejects a table if it contains a lease of another stream."""

    def reads(self, lease: Lease) -> bool:
        if lease.key == "stranger":
            raise SourceError("lease 'stranger': it is of another hub")
        return True


def at_work(store: FaultyStore, source: ListSource) -> DrivenWorker:
    """Return a worker that holds all leases."""
    driven_worker = member(store, source, Clock())
    driven_worker.run(30.0)
    assert driven_worker.held == ALL
    return driven_worker


def test_rejected_listing_is_retried_while_held_leases_are_read(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore()
    driven_worker = at_work(store, ListSource(four_shards()))
    store.fault = REFUSED
    driven_worker.run(120.0)
    assert driven_worker.held == ALL
    assert "4 leases are read while they can be renewed: leases: AccessDeniedException: 403" in caplog.text


def test_lease_unknown_to_the_source_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore()
    driven_worker = at_work(store, SelectiveListSource(four_shards()))
    store.write(CreateLease(Lease("stranger")))
    driven_worker.run(120.0)
    assert driven_worker.held == ALL
    assert "lease 'stranger': it is of another hub" in caplog.text


def test_worker_keeps_trying_after_its_leases_expired(caplog: pytest.LogCaptureFixture) -> None:
    """After an outage that is longer than a lease, workers continue without a restart."""
    store = FaultyStore()
    driven_worker = at_work(store, ListSource(four_shards()))
    store.fault, store.down = REFUSED, True
    driven_worker.run(60.0)
    assert driven_worker.held == []
    assert "nothing is held: leases: AccessDeniedException: 403" in caplog.text
    store.fault, store.down = None, False
    driven_worker.run(60.0)
    assert driven_worker.held == ALL


def test_store_or_source_that_never_worked_is_an_error() -> None:
    store = FaultyStore()
    store.fault = REFUSED
    with pytest.raises(StoreError, match="403"):
        member(store, ListSource(four_shards()), Clock()).run(1.0)
    store_with_foreign_lease = FaultyStore()
    store_with_foreign_lease.write(CreateLease(Lease("stranger")))
    with pytest.raises(SourceError, match="another hub"):
        member(store_with_foreign_lease, SelectiveListSource(four_shards()), Clock()).run(1.0)


class SourceWithIncarnation(ListSource):
    """A stream that reports its incarnation."""

    def __init__(self, name: str) -> None:
        super().__init__(four_shards())
        self._name = name

    def incarnation(self) -> str:
        return f"1:{self._name}:1700000000"


def test_worker_on_another_streams_table_ends_and_leaves_the_table_alone() -> None:
    """The worker must not change the rows of the group that uses the table."""
    store, clock = FaultyStore(), Clock()
    owner = member(store, SourceWithIncarnation("orders"), clock)
    owner.run(30.0)
    rows_before = [(lease.key, lease.version, lease.annotations) for lease in store.list().leases]
    worker_of_other_stream = member(store, SourceWithIncarnation("returns"), clock, me="stranger")
    with pytest.raises(WorkerError, match="the leases are those of 1:orders, and 1:returns is read: give each stream"):
        worker_of_other_stream.worker.turn(clock.now)
    assert [(lease.key, lease.version, lease.annotations) for lease in store.list().leases] == rows_before
    owner.run(30.0)
    assert owner.held == ALL


def test_foreign_row_that_appears_later_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The error is only logged, because the worker that wrote the foreign row may remove it."""
    store = FaultyStore()
    driven_worker = at_work(store, SourceWithIncarnation("orders"))
    store.write(CreateLease(Lease("s-9", annotations=((INCARNATION, "1:returns:1700000000"),))))
    driven_worker.run(120.0)
    assert "the leases are those of 1:returns, and 1:orders is read" in caplog.text
