"""Workers that share one in-memory store. Only the test moves their clock, so every run is the same."""

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
    """An in-memory store that records its calls, and fails as a test defines.

    Attributes:
        capabilities: The capabilities of the simulated layout.
        down: Whether the store cannot be reached.
        fault: The error that listings raise, or None.
        bad: The keys of rows that were edited by hand and cannot be read.
        refuses: The kinds of writes that are rejected. The rejection contains the current row.
        lose_replies: The number of responses that are still to be lost. Only writes of the kinds in `losing` are
            affected.
        passes: A function that is called before and after each write to the table.
        write_requests: All writes that were requested. `outcomes` contains the outcomes of those that reached the
            table.
        readings: For each read, its keys (None for all) and whether its result may be stale.
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
        """Change a row directly in the table, without any worker's knowledge."""
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
    """A stream that fails as a test defines, and keeps its readers.

    Attributes:
        faults: The errors that the next listings raise, in order. None means that the listing succeeds.
        on_read: A function that is called with each batch. It may return another batch that replaces it, or None. If
            the function raises an exception, the reader has already advanced.
        present: The position of LATEST for all shards, or None to compute it for each shard.
        readers: The readers that were opened. `epochs` contains the epoch of the lease of each reader.
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
        """Return a reader that calls `on_read` with each batch."""
        self.readers.append(FaultyReader(self, super().open(lease, start)))
        self.epochs.append(lease.epoch)
        return self.readers[-1]


@define
class FaultyReader:
    """A reader of a `FaultySource`. It checks that it is neither read nor closed again after it was closed."""

    source: FaultySource
    reader: Reader
    closed: bool = False

    def read(self) -> Batch:
        """Return the next batch, or the one with which `on_read` replaces it."""
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
    """An executor that runs no handlers itself. The test runs them.

    Attributes:
        waiting: The work that was passed to `start` and has not begun yet.
        replaced: The slow work for which a replacement thread was requested.
        stuck: Whether all threads are slow.
        refuses: Whether the system refuses to start threads.
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
        """Do nothing, because there are no threads."""


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
    """A consumer that records its calls and reads nothing.

    While `busy` is set, it behaves as if a batch were running, and releases no lease.
    """

    begun: list[Holding] = field(factory=list)
    releasing: list[Holding] = field(factory=list)
    busy: bool = False

    def begin(self, holding: Holding) -> None:
        self.begun.append(holding)

    def release(self, holding: Holding) -> None:
        """Record the request, and release the lease unless `busy` is set."""
        self.releasing.append(holding)
        if not self.busy:
            holding.release()


@define
class DrivenWorker:
    """A worker, and the times at which its next renewal and its next turn are due on the test's clock."""

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
    """Return a worker whose consumer only records its calls."""
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
    while (
        due_time := min(min(driven_worker.renew_due, driven_worker.turn_due) for driven_worker in members)
    ) <= end_time:
        clock.now = max(clock.now, due_time)
        for driven_worker in members:
            driven_worker.step()
    clock.now = end_time
