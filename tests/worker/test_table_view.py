"""A worker's view of its lease table: what the worker has read, and what it must still read."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest

from leasehold.adapters.worker.table_view import TableView
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position, Shard
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Listing
from leasehold.stores.writes import ClaimLease, CreateLease, DeleteLease

CONFIG = Config()


class Table(MemoryStore):
    """A table whose listings may fail. `meanwhile` is called during each listing."""

    fails = False

    def list(self) -> Listing:
        if self.fails:
            raise StoreError("no response")
        self.meanwhile()
        return super().list()

    def meanwhile(self) -> None:
        """Do nothing, unless a test replaces this method."""


def view_of(table: Table, times: list[float]) -> TableView:
    """Return the view of a worker whose clock shows the last of these times."""
    return TableView(table, CONFIG, lambda: times[-1])


def test_dropped_lease_needs_a_listing_until_one_succeeds() -> None:
    """Reads of single rows and failed listings do not show all rows that still name this worker."""
    table = Table()
    view = view_of(table, [0.0])
    view.note_lease_dropped()
    view.read(("s-0",), stale_ok=False)
    table.fails = True
    with pytest.raises(StoreError):
        view.read(None, stale_ok=False)
    listing_needed = [view.needs_listing]
    table.fails = False
    view.read(None, stale_ok=False)
    assert [*listing_needed, view.needs_listing] == [True, False]


def test_lease_dropped_during_a_listing_needs_another_listing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listing may have read the row before the lease was dropped."""
    table = Table()
    view = view_of(table, [0.0])
    monkeypatch.setattr(table, "meanwhile", view.note_lease_dropped)
    view.read(None, stale_ok=False)
    assert view.needs_listing


def test_listing_ages_while_it_runs_and_is_outdated_after_a_lease_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leases are created only according to a recent listing."""
    table, times, ages = Table(), [100.0], list[float]()
    view = view_of(table, times)
    assert view.is_outdated(100.0)
    monkeypatch.setattr(table, "meanwhile", lambda: ages.append(view.listing_seconds(103.0)))
    view.read(None, stale_ok=False)
    assert (ages, view.listing_seconds(104.0)) == ([3.0], 0.0)
    assert [view.is_outdated(100.0 + CONFIG.lease_seconds + extra_seconds) for extra_seconds in (0.0, 0.1)] == [
        False,
        True,
    ]


def test_finished_lease_may_be_deleted_once_every_earlier_reading_is_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before the deletion counts from the end of the first listing that showed the lease as finished."""
    table, times = Table(), [100.0]
    for key in ("s-0", "s-1"):
        table.write(CreateLease(Lease(key, checkpoint=SHARD_END if key == "s-0" else TRIM_HORIZON)))
    view = view_of(table, times)

    def read() -> None:
        read_start = times[-1]
        rows = view.read(None, stale_ok=False)
        view.remember_rows(rows.leases, read_start, None, rows.reports)

    monkeypatch.setattr(table, "meanwhile", lambda: times.append(103.0))
    read()
    monkeypatch.setattr(table, "meanwhile", lambda: times.append(109.0))
    read()
    deletable_keys = [
        view.finished_long_ago(103.0 + CONFIG.lease_seconds + extra_seconds) for extra_seconds in (0.0, 0.1)
    ]
    assert deletable_keys == [frozenset(), {"s-0"}]
    table.write(DeleteLease(table.get(["s-0"])[0]))
    read()
    assert view.finished_long_ago(1000.0) == frozenset()


def test_written_row_is_known_without_another_read() -> None:
    """The view takes the row from the response to the write (C10)."""
    table = Table()
    table.write(CreateLease(Lease("s-0")))
    view = view_of(table, [0.0])
    rows = view.read(None, stale_ok=False)
    assert [lease.key for lease in view.remember_rows(rows.leases, 0.0, None, rows.reports)] == ["s-0"]
    assert sorted(view.watch.sightings) == ["s-0"]


def test_only_a_read_of_the_whole_table_in_progress_is_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed listing is over, too. Otherwise, the lookout would report an endless one."""
    table, ages = Table(), list[float]()
    view = view_of(table, [100.0])
    original_get = table.get

    def get(keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        ages.append(view.listing_seconds(103.0))
        return original_get(keys, stale_ok=stale_ok)

    monkeypatch.setattr(table, "get", get)
    view.read(("s-0",), stale_ok=False)
    table.fails = True
    with pytest.raises(StoreError):
        view.read(None, stale_ok=False)
    assert (ages, view.listing_seconds(104.0)) == ([0.0], 0.0)


def view_after_pause(*pause: float) -> tuple[TableView, tuple[Lease, ...], list[Shard]]:
    """Return a view that knew s-0 and s-2 before these times at which its process ran, and what is there afterwards."""
    table, times = Table(), [0.0]
    shards = [Shard("s-0", open=False), Shard("s-1", parents=("s-0",)), Shard("s-2")]
    for key in ("s-0", "s-2"):
        table.write(CreateLease(Lease(key, checkpoint=Position("7"))))
    view = view_of(table, times)
    view.note_running(0.0)
    rows = view.read(None, stale_ok=False)
    view.remember_rows(rows.leases, 0.0, None)
    for time in pause:
        times.append(time)
        view.note_running(time)
    for key in ("s-0", "s-2"):
        table.write(DeleteLease(table.get([key])[0]))
    table.write(CreateLease(Lease("s-1", parents=("s-0",), checkpoint=Position("8"))))
    rows = view.read(None, stale_ok=False)
    return view, tuple(view.remember_rows(rows.leases, times[-1], None)), shards


@pytest.mark.parametrize(
    ("pause", "ended"),
    [
        ((CONFIG.lease_seconds + 0.1,), {"s-0"}),
        ((CONFIG.lease_seconds,), set()),
        ((CONFIG.lease_seconds, 2 * CONFIG.lease_seconds), set()),
        ((CONFIG.lease_seconds + 0.1, CONFIG.lease_seconds + 0.2), {"s-0"}),
    ],
)
def test_lease_that_others_finished_during_a_pause_counts_as_finished(
    pause: tuple[float, ...], ended: set[str]
) -> None:
    """Only a descendant that has begun shows the end, and only of a lease that was known before a pause (L13)."""
    view, leases, shards = view_after_pause(*pause)
    history = view.history(leases, shards)
    assert {lease.key for lease in history.gone} == {"s-0", "s-2"}
    assert {lease.key for lease in history.gone if lease.ended} == ended


@pytest.mark.parametrize(
    ("steps", "ended"),
    [
        pytest.param("create s-0, read, delete s-0, read, pause, create s-1, read", {"s-0"}, id="gone before"),
        pytest.param("create s-0, read, pause, get s-2, delete s-0, create s-1, read", {"s-0"}, id="partial read"),
        pytest.param("create s-0, read, pause, read, delete s-0, create s-1, read", set(), id="there afterwards"),
        pytest.param(
            "create s-2, read, pause, delete s-2, create s-0, read, delete s-0, create s-1, read", set(), id="new"
        ),
    ],
)
def test_only_leases_without_a_row_after_the_pause_were_finished_in_it(steps: str, ended: set[str]) -> None:
    """The first full read after a pause decides. A lease that disappears later may not have been finished."""
    table, times = Table(), [0.0]
    shards = [Shard("s-0", open=False), Shard("s-1", parents=("s-0",)), Shard("s-2")]
    view = view_of(table, times)
    history = view.history((), shards)
    for step in steps.split(", "):
        action, _, key = step.partition(" ")
        times.append(times[-1] + (2 * CONFIG.lease_seconds if action == "pause" else 1.0))
        view.note_running(times[-1])
        if action == "create":
            table.write(CreateLease(Lease(key, parents=("s-0",) if key == "s-1" else (), checkpoint=Position("7"))))
        elif action == "delete":
            table.write(DeleteLease(table.get([key])[0]))
        elif action in {"get", "read"}:
            keys = (key,) if action == "get" else None
            rows = view.read(keys, stale_ok=False)
            history = view.history(view.remember_rows(rows.leases, times[-1], keys), shards)
    assert {lease.key for lease in history.gone if lease.ended} == ended


@pytest.mark.parametrize(("failed", "idle"), [((), 90.0), ((89.5,), 90.0), ((1.0,), 0.0), ((1.0, 89.5), 0.0)])
def test_time_of_an_outage_does_not_count_against_owners(failed: tuple[float, ...], idle: float) -> None:
    """Owners cannot renew their leases while the table does not respond (C17)."""
    table, times = Table(), [0.0]
    table.write(CreateLease(Lease("s-0")))
    (row,) = table.get(["s-0"])
    table.write(ClaimLease(row, "b-1"))
    view = view_of(table, times)
    leases: Sequence[Lease] = ()
    for time in (0.0, *failed, 90.0):
        times.append(time)
        table.fails = time in failed
        with suppress(StoreError):
            rows = view.read(None, stale_ok=False)
            leases = view.remember_rows(rows.leases, time, None)
    (lease,) = leases
    assert lease.idle == idle
