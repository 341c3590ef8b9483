"""Tests a store when any call below it, such as a client, driver or codec, raises an unexpected exception."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import pytest
from attrs import Factory, define
from boto3 import Session
from object_memory import ObjectMemory
from object_stores import AgelessGcs, AgelessS3, bucket

from leasehold.adapters.ops.swapping import set_direction
from leasehold.balancer.model import SHARD_END, Lease, Position
from leasehold.stores import postgres
from leasehold.stores.dynamodb.cells import Clients
from leasehold.stores.dynamodb.store import DynamoStore
from leasehold.stores.embedded.memory import MemoryCells, MemoryStore
from leasehold.stores.embedded.sqlite import SqliteCells, SqliteStore
from leasehold.stores.objects.generic_layout import ObjectLayout
from leasehold.stores.objects.store import EtagStore, ObjectCells
from leasehold.stores.protocol import Done, Lost, Store
from leasehold.stores.sessions.rows import SESSIONS, parse_session, require_valid_row
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import TO, SwapStore, get_or_create_control_row
from leasehold.stores.urls import open_store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLease,
    ClaimLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
    Write,
    lease_after_write,
)
from leasehold_lab.contract.actors import create_owned_lease, expect_applied, read_stored_lease
from leasehold_lab.standins.postgres import build_store_url

KEY = "s-0"
AT, NEXT = Position("41"), Position("42")

ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: KeyError("x"),
    MemoryError,
    RecursionError,
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"),
    KeyboardInterrupt,
    SystemExit,
)

_numbers = count()


@define
class Fault:
    """Raises an exception at one of the calls that it wraps, while it is armed.

    Attributes:
        place: The number of the call that raises, counted from 0. If negative, no call raises.
        after: True if the call is carried out before it raises.
    """

    place: int = -1
    after: bool = False
    seen: int = 0
    error: Callable[[], BaseException] = MemoryError
    raised: BaseException | None = None

    def arm(self, call_number: int, error: Callable[[], BaseException], *, after_call: bool) -> None:
        """Raise this exception at the call with this number, counted from now."""
        self.place, self.error, self.after, self.seen, self.raised = call_number, error, after_call, 0, None

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call so that it raises if it is the one that was selected."""

        def call_or_raise(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the call's
            is_selected, self.seen = self.seen == self.place, self.seen + 1
            if not is_selected:
                return call(*args, **kwargs)
            if self.after:
                call(*args, **kwargs)
            self.raised = self.error()
            raise self.raised

        return call_or_raise


class FaultyProxy:
    """A proxy that wraps all methods of an object, so that they may raise."""

    def __init__(self, inner: object, fault: Fault) -> None:
        self._inner, self._fault = inner, fault

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  as the inner object's
        attribute = getattr(self._inner, name)
        return self._fault.around(attribute) if callable(attribute) and name != "close" else attribute


@define
class Table:
    """The functions that open a table of one kind with and without faults."""

    faulty: Callable[[], Store]
    plain: Callable[[], Store]
    fault: Fault = Factory(Fault)


Opening = Callable[[pytest.FixtureRequest], Table]


def in_memory(request: pytest.FixtureRequest) -> Table:
    """Return an in-memory table. Faults occur when a store decides whether to apply a write."""
    fault, name = Fault(), f"foreign-{next(_numbers)}"
    patch = request.getfixturevalue("monkeypatch")
    patch.setattr("leasehold.stores.embedded.memory.lease_after_write", fault.around(lease_after_write))
    return Table(lambda: MemoryStore(name), lambda: MemoryStore(name), fault)


def memory_sessions(_request: pytest.FixtureRequest) -> Table:
    fault, cells = Fault(), MemoryCells()
    return Table(
        lambda: SessionStore(FaultyProxy(cells, fault), gather_seconds=0.0),
        lambda: SessionStore(cells, gather_seconds=0.0),
        fault,
    )


def objects(_request: pytest.FixtureRequest) -> Table:
    """Return a table in the default layout of a bucket."""
    fault, bucket, layout = Fault(), ObjectMemory(), ObjectLayout("fleet")
    return Table(
        lambda: EtagStore(FaultyProxy(bucket, fault), layout),
        lambda: EtagStore(bucket, layout),
        fault,
    )


def object_sessions(_request: pytest.FixtureRequest) -> Table:
    """Return a table in the `sessions` layout of a bucket."""
    fault, bucket = Fault(), ObjectMemory()
    return Table(
        lambda: SessionStore(ObjectCells(FaultyProxy(bucket, fault), ""), gather_seconds=0.0),
        lambda: SessionStore(ObjectCells(bucket, ""), gather_seconds=0.0),
        fault,
    )


def open_faulty_sqlite(path: str, fault: Fault) -> SqliteStore:
    """Open a file whose statements may fail.

    A statement that would have to wait for another transaction fails immediately.
    """
    store = SqliteStore(path, busy_seconds=0.0)
    store._connection = FaultyProxy(store._connection, fault)  # type: ignore[assignment]  # noqa: SLF001  its driver
    return store


def sqlite_file(request: pytest.FixtureRequest) -> Table:
    """Return a file in the default layout."""
    path, fault = f"{request.getfixturevalue('tmp_path')}/{next(_numbers)}.db", Fault()
    return Table(lambda: open_faulty_sqlite(path, fault), lambda: SqliteStore(path, busy_seconds=0.0), fault)


def sqlite_sessions(request: pytest.FixtureRequest) -> Table:
    """Return a file in the `sessions` layout."""
    path, fault = f"{request.getfixturevalue('tmp_path')}/{next(_numbers)}.db", Fault()
    return Table(
        lambda: SessionStore(SqliteCells(open_faulty_sqlite(path, fault)), gather_seconds=0.0),
        lambda: SessionStore(SqliteCells(SqliteStore(path, busy_seconds=0.0)), gather_seconds=0.0),
        fault,
    )


def dynamodb(request: pytest.FixtureRequest) -> Table:
    """Return a table in the KCL's layout, under a prefix. The calls of its clients may fail."""
    fault, prefix = Fault(), f"app-{next(_numbers)}/"

    def plain() -> DynamoStore:
        url = request.getfixturevalue("dynalite_url")
        return DynamoStore("foreign", endpoint=url, session=Session(), prefix=prefix)

    def faulty() -> DynamoStore:
        store = plain()
        clients = store._clients  # noqa: SLF001  its driver
        store._clients = Clients(FaultyProxy(clients.reads, fault), FaultyProxy(clients.writes, fault))  # type: ignore[arg-type]  # noqa: SLF001
        return store

    return Table(faulty, plain, fault)


def dynamodb_sessions(request: pytest.FixtureRequest) -> Table:
    """Return a DynamoDB table in the `sessions` layout."""
    table = dynamodb(request)

    def open_in_sessions(open_table: Callable[[], Store]) -> Callable[[], Store]:
        def open_sessions() -> SessionStore:
            store = open_table()
            assert isinstance(store, DynamoStore)
            return SessionStore(store.cells(), gather_seconds=0.0)

        return open_sessions

    return Table(open_in_sessions(table.faulty), open_in_sessions(table.plain), table.fault)


def postgresql(request: pytest.FixtureRequest) -> Table:
    """Return a table on a real server. Its statements may fail."""
    fault, url = Fault(), build_store_url(request.getfixturevalue("postgres_service"), f"foreign_{next(_numbers)}")
    connection_class, execute = postgres._TimeoutConnection, postgres._TimeoutConnection.execute  # noqa: SLF001  its driver

    def execute_with_faults(connection: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as psycopg's
        return fault.around(execute)(connection, *args, **kwargs)

    request.getfixturevalue("monkeypatch").setattr(connection_class, "execute", execute_with_faults)
    return Table(lambda: open_store(url), lambda: open_store(url), fault)


def moving(_request: pytest.FixtureRequest) -> Table:
    """Return the two tables of a swap. Each lease moves to the second table with its next renewal."""
    fault, buckets = Fault(), (ObjectMemory(), ObjectMemory())
    names = ("memory://from", "memory://to")

    def opened(wrap_bucket: Callable[[ObjectMemory], Any]) -> SwapStore:
        first, second = (EtagStore(wrap_bucket(bucket), ObjectLayout("fleet")) for bucket in buckets)
        return SwapStore((first, second), names[TO], control_interval_seconds=0.0)

    tables: tuple[Store, Store] = tuple(EtagStore(bucket, ObjectLayout("fleet")) for bucket in buckets)  # type: ignore[assignment]
    get_or_create_control_row(tables, names)
    set_direction(tables, "to")
    return Table(
        lambda: opened(lambda bucket: FaultyProxy(bucket, fault)), lambda: opened(lambda bucket: bucket), fault
    )


def s3(request: pytest.FixtureRequest) -> Table:
    """Return a bucket. The calls of its clients may fail."""
    fault, objects, layout = Fault(), bucket(request.getfixturevalue("versitygw_url")), ObjectLayout("fleet")

    def faulty() -> EtagStore:
        faulty_objects = AgelessS3(objects.bucket, endpoint=request.getfixturevalue("versitygw_url"))
        clients = faulty_objects._read_client, faulty_objects._write_client  # noqa: SLF001  the bucket's clients
        faulty_objects._read_client, faulty_objects._write_client = (FaultyProxy(client, fault) for client in clients)  # type: ignore[assignment]  # noqa: SLF001
        return EtagStore(faulty_objects, layout)

    return Table(faulty, lambda: EtagStore(objects, layout), fault)


def gcs(request: pytest.FixtureRequest) -> Table:
    """Return a bucket. The calls of its HTTP session may fail."""
    fault, layout = Fault(), ObjectLayout(f"fleet/{next(_numbers)}")

    def opened() -> AgelessGcs:
        objects = AgelessGcs("foreign", endpoint=request.getfixturevalue("gcs_url"))
        objects.ensure_bucket(create=True)
        return objects

    def faulty() -> EtagStore:
        objects = opened()
        objects._session.request = fault.around(objects._session.request)  # type: ignore[method-assign]  # noqa: SLF001
        return EtagStore(objects, layout)

    return Table(faulty, lambda: EtagStore(opened(), layout), fault)


SERVICES = (pytest.mark.services, pytest.mark.more)

KINDS = (
    in_memory,
    memory_sessions,
    objects,
    object_sessions,
    sqlite_file,
    sqlite_sessions,
    moving,
    *(pytest.param(kind, marks=SERVICES) for kind in (dynamodb, dynamodb_sessions, postgresql, s3, gcs)),
)

WRITES: Mapping[str, tuple[str, Callable[[Lease], Write]]] = {
    "renewal": ("held", RenewLease),
    "checkpoint": ("held", lambda lease: CheckpointLease(lease, NEXT)),
    "end": ("held", lambda lease: CheckpointLease(lease, SHARD_END)),
    "gift": ("requested", lambda lease: GiveLease(lease, NEXT)),
    "release": ("held", lambda lease: ReleaseLease(lease, "ann")),
    "theft": ("held", lambda lease: StealLease(lease, "bob")),
    "claim": ("released", lambda lease: ClaimLease(lease, "ann")),
    "request": ("held", lambda lease: RequestLease(lease, "bob")),
    "note": ("held", lambda lease: AnnotateLease(lease, "a", "1")),
}
"""For each write, the state that the lease must be in, and how to build the write."""


@pytest.fixture
def opened() -> Iterator[Callable[[Callable[[], Store]], Store]]:
    """Return a function that opens stores. They are closed at the end of the test."""
    stores: list[Store] = []

    def open_and_register(make: Callable[[], Store]) -> Store:
        stores.append(make())
        return stores[-1]

    yield open_and_register
    for store in stores:
        store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_exception_undoes_no_write_and_blocks_no_worker(
    kind: Opening,
    case: str,
    after: bool,
    request: pytest.FixtureRequest,
    opened: Callable[[Callable[[], Store]], Store],
) -> None:
    """A write that returned Done is stored, and later writes of this store and of the next owner succeed."""
    lease_state, write = WRITES[case]
    for call_number in range(64):
        table = kind(request)
        store, bob_store, cat_store = opened(table.faulty), opened(table.plain), opened(table.plain)
        lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store, key=KEY), AT)))
        second_lease = expect_applied(store.write(CheckpointLease(create_owned_lease(store, key="s-1"), AT)))
        if lease_state == "released":
            lease = expect_applied(store.write(ReleaseLease(lease, "ann")))
        if lease_state == "requested":
            lease = expect_applied(bob_store.write(RequestLease(read_stored_lease(bob_store, KEY), "bob")))
        # Vary the exception, so that each kind is raised at some calls, and each call raises in some cases.
        table.fault.arm(call_number, ERRORS[(call_number + list(WRITES).index(case)) % len(ERRORS)], after_call=after)
        outcome: object = None
        try:
            outcome = store.write(write(lease))
        except BaseException:
            if table.fault.raised is None:
                raise
        table.fault.place = -1
        remaining_lease = read_stored_lease(cat_store, KEY)
        if isinstance(outcome, Done):
            assert (remaining_lease.checkpoint, remaining_lease.owner, remaining_lease.next_owner) == (
                outcome.lease.checkpoint,
                outcome.lease.owner,
                outcome.lease.next_owner,
            )
        assert remaining_lease.checkpoint in {AT, NEXT, SHARD_END}
        # The store can still write its other lease, and the next owner can write this one.
        assert (
            expect_applied(store.write(CheckpointLease(second_lease, NEXT))).checkpoint
            == read_stored_lease(cat_store, "s-1").checkpoint
            == NEXT
        )
        if not remaining_lease.ended:
            assert (
                expect_applied(cat_store.write(ClaimLease(read_stored_lease(cat_store, KEY), "cat"))).checkpoint
                == remaining_lease.checkpoint
            )
            assert isinstance(store.write(CheckpointLease(lease, Position("99"))), Lost)
            assert read_stored_lease(bob_store, KEY).owner == "cat"
        if table.fault.raised is None:
            assert call_number, "no call was seen"
            assert isinstance(outcome, Done)
            return
    pytest.fail("more calls than expected")


@pytest.mark.parametrize("place", range(3))
def test_closing_a_store_ends_every_session_even_if_one_raises(place: int) -> None:
    """Closing continues after an exception. A session that could not be ended expires later."""
    cells, fault, closed_names = MemoryCells(), Fault(), list[str]()
    cells.page_leases = 1
    rows = FaultyProxy(cells, fault)
    rows.close = lambda: closed_names.append("rows")  # type: ignore[attr-defined]
    store = SessionStore(rows, gather_seconds=0.0)
    for number in range(3):
        create_owned_lease(store, key=f"s-{number}")
    fault.arm(place, ERRORS[place], after_call=False)
    store.close()
    assert fault.raised is not None
    ended_flags = [require_valid_row(parse_session(session_row)).ended for session_row in cells.list(SESSIONS)]
    assert (ended_flags.count(True), closed_names) == (2, ["rows"])
