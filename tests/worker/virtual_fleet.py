"""Workers on one in-memory store under a clock that only the test moves, so that every run is the same."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from attrs import define, field
from waiters import Clock

from leasehold.adapters.consumer.executors import Work
from leasehold.adapters.sources.protocol import Batch, Reader
from leasehold.adapters.threads import ThreadScheduler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import BackgroundMap
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard
from leasehold.balancer.rules.kcl import Kcl
from leasehold.errors import OutcomeUnknown, SourceError, StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Capabilities, Listing, Lost, Malformed, Outcome
from leasehold.stores.writes import DeleteLease, LeaseChange, Write
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_even_shards, create_records

DEFAULT_CAPABILITIES = Capabilities()
KCL = Config(Kcl(max_steals=10), lease_seconds=10.0, initial_position=TRIM_HORIZON)


class FaultyStore(MemoryStore):
    """A memory store that fails when a test says so, and records its calls.

    Attributes:
        capabilities: The capabilities of the layout.
        down: Whether the store cannot be reached.
        fault: Raised by listings.
        bad: The keys of rows that were edited by hand and cannot be read.
        refuses: Writes of these kinds are rejected, and the rejection contains the current row.
        lose_replies: How many responses are lost, to writes of the kinds in `losing`.
        passes: Called before each write to the table, and again after it.
        write_requests: All writes that were requested. `outcomes` contains the responses that were returned.
        readings: The keys of each read (None for all), and whether it may be stale.
    """

    def __init__(self, capabilities: Capabilities = DEFAULT_CAPABILITIES) -> None:
        super().__init__()
        self._capabilities = capabilities
        self.down = False
        self.fault: BaseException | None = None
        self.bad: set[str] = set()
        self.refuses: tuple[type[Write], ...] = ()
        self.lose_replies = 0
        self.losing: tuple[type[Write], ...] = get_args(LeaseChange)
        self.passes: Callable[[], None] = lambda: None
        self.writes: list[str] = []
        self.write_requests: list[Write] = []
        self.outcomes: list[Outcome] = []
        self.readings: list[tuple[tuple[str, ...] | None, bool]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def _raise_if_down(self) -> None:
        if self.down:
            raise OutcomeUnknown("the store cannot be reached")

    def list(self) -> Listing:
        self.readings.append((None, True))
        if self.fault is not None:
            raise self.fault
        self._raise_if_down()
        readable_leases = tuple(lease for lease in super().list().leases if lease.key not in self.bad)
        return Listing(readable_leases, tuple(Malformed(key, "notes", "is not JSON") for key in sorted(self.bad)))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases.

        Raises OutcomeUnknown if the store is down, and StoreError if a row cannot be read, because no decision may be
        based on such a row.
        """
        requested_keys = tuple(keys)
        self.readings.append((requested_keys, stale_ok))
        self._raise_if_down()
        if self.bad.intersection(requested_keys):
            raise StoreError("lease s-0: notes: is not JSON")
        return super().get(requested_keys, stale_ok=stale_ok)

    def rewrite(self, key: str, change: Callable[[Lease], Lease]) -> None:
        """Change a row without the knowledge of any worker."""
        self._table.rows[key] = change(self.row(key))

    def row(self, key: str) -> Lease:
        """Return the current row with this key."""
        return super().get([key])[0]

    def write(self, write: Write) -> Outcome:
        """Apply the write if the store is reachable. Responses to a creation or deletion are never lost."""
        self.write_requests.append(write)
        self._raise_if_down()
        self.passes()
        is_rejected = isinstance(write, self.refuses)
        outcome = Lost(write.lease.key, self.row(write.lease.key)) if is_rejected else super().write(write)
        self.passes()
        if not isinstance(write, DeleteLease):
            self.writes.append(write.lease.key)
        self.outcomes.append(outcome)
        if self.lose_replies and isinstance(write, self.losing):
            self.lose_replies -= 1
            raise OutcomeUnknown("the reply was lost")
        return outcome


@define
class FaultySource(ListSource):
    """A stream that fails when a test says so, and keeps its readers.

    Attributes:
        faults: The errors that the next listings raise. None means that the listing succeeds.
        on_read: Called with each batch. It may return another batch in its place, or None. If it raises an
            exception, the reader has already advanced.
        present: The position of LATEST, if it is the same for all shards.
        readers: The readers that were opened; `epochs` has the epoch of the lease for each.
    """

    faults: list[SourceError | None] = field(factory=list)
    on_read: Callable[[Batch], Batch | None] = lambda _batch: None
    present: Position | None = None
    readers: list["FaultyReader"] = field(factory=list)
    epochs: list[int] = field(factory=list)

    def shards(self) -> tuple[Shard, ...]:
        """Return the listing, or raise the next fault."""
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return super().shards()

    def latest(self, lease: Lease) -> Position:
        """Return `present` if it is set, and otherwise the position after the last record."""
        return super().latest(lease) if self.present is None else self.present

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader that fails as its stream does."""
        self.readers.append(FaultyReader(self, super().open(lease, start)))
        self.epochs.append(lease.epoch)
        return self.readers[-1]


@define
class FaultyReader:
    """A reader of a FaultySource. Once it is closed, it must not be read or closed again."""

    source: FaultySource
    reader: Reader
    closed: bool = False

    def read(self) -> Batch:
        """Return the next records as the stream has them."""
        assert not self.closed, "a reader that was closed is read"
        batch = self.reader.read()
        other_batch = self.source.on_read(batch)
        return batch if other_batch is None else other_batch

    def close(self) -> None:
        assert not self.closed, "a reader is closed twice"
        self.closed = True
        self.reader.close()


@define
class ManualExecutor:
    """An executor whose handlers run only when the test says so.

    Attributes:
        waiting: The work that was passed to `start` and has not begun.
        replaced: The slow work for which another thread was requested.
        stuck: Whether all threads are slow.
        refuses: Whether the system starts no more threads.
    """

    waiting: list[Work] = field(factory=list)
    replaced: list[Work] = field(factory=list)
    stuck: bool = False
    refuses: bool = False

    def start(self, work: Work) -> None:
        if self.refuses:
            raise RuntimeError("can't start new thread")
        self.waiting.append(work)

    def withdraw(self, work: Work) -> bool:
        """Withdraw the work, unless it has begun."""
        if work not in self.waiting:
            return False
        self.waiting.remove(work)
        return True

    def replace_slow_thread(self, work: Work) -> None:
        self.replaced.append(work)

    def close(self) -> None:
        """Nothing to close."""


def four_shards() -> list[Shard]:
    """Return a stream of four equal shards."""
    return create_even_shards(("s-0", "s-1", "s-2", "s-3"))


def stream_with_five_records() -> ListSource:
    """Return a stream of four shards with five records each."""
    return ListSource(
        four_shards(), {f"s-{shard_number}": ShardRecords(create_records(5)) for shard_number in range(4)}
    )


@define
class RecordingConsumer:
    """A consumer that records its calls. The test does the work.

    While `busy` is set, a batch counts as running, so no lease is released.
    """

    begun: list[Holding] = field(factory=list)
    releasing: list[Holding] = field(factory=list)
    busy: bool = False

    def begin(self, holding: Holding) -> None:
        self.begun.append(holding)

    def release(self, holding: Holding) -> None:
        """Release at once, unless a batch is running."""
        self.releasing.append(holding)
        if not self.busy:
            holding.release()


@define
class DrivenWorker:
    """One worker, and the times on the test's clock at which its next renewal and its next turn are due."""

    worker: Worker
    clock: Clock
    renew_due: float = 0.0
    turn_due: float = 0.0
    each_renewal: BackgroundMap = map

    def run(self, seconds: float) -> None:
        """Run the renewals and turns that are due within this many seconds."""
        end_time = self.clock.now + seconds
        while min(self.renew_due, self.turn_due) <= end_time:
            self.clock.now = max(self.clock.now, min(self.renew_due, self.turn_due))
            self.step()
        self.clock.now = end_time

    def step(self) -> None:
        now = self.clock.now
        if self.renew_due <= now:
            self.renew_due = self.worker.renew(now, self.each_renewal)
        if self.turn_due <= now:
            self.turn_due = self.worker.turn(now)

    @property
    def held(self) -> list[str]:
        return [holding.key for holding in self.worker.holdings]


def member(  # noqa: PLR0917  tests pass the last ones by name
    store: MemoryStore,
    source: ListSource,
    clock: Clock,
    me: str = "a-1",
    process: str = "p-1",
    config: Config = KCL,
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None,
) -> DrivenWorker:
    """Return a worker that shares leases, with a consumer that records its calls."""
    worker = Worker(
        store=store,
        source=source,
        me=me,
        config=config,
        consumer=RecordingConsumer(),
        scheduler=ThreadScheduler(clock, process_id=process),
        if_recreated=if_recreated,
    )
    return DrivenWorker(worker, clock, clock.now, clock.now)


def together(members: list[DrivenWorker], seconds: float) -> None:
    """Run the renewals and turns of several workers that are due within this many seconds, in order of time."""
    clock = members[0].clock
    end_time = clock.now + seconds
    while (due_time := min(min(driven.renew_due, driven.turn_due) for driven in members)) <= end_time:
        clock.now = max(clock.now, due_time)
        for driven in members:
            driven.step()
    clock.now = end_time
