"""Workers on one memory store under a clock that only the test moves: nothing sleeps, nothing is left to chance."""

from collections.abc import Callable, Iterable
from typing import get_args

from attrs import define, field
from waiters import Clock

from leasehold.adapters.consumer.executors import Work
from leasehold.adapters.sources.protocol import Batch, Reader
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
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, even_shards, records

PROMISES = Capabilities()
KCL = Config(Kcl(max_steals=10), lease_seconds=10.0, initial_position=TRIM_HORIZON)


class FaultyStore(MemoryStore):
    """A memory store that fails as a test says, and keeps what it was asked.

    promises      what the layout keeps
    down          it cannot be reached
    fault         raised by a listing
    bad           the keys of rows that somebody has edited by hand: they cannot be read
    refuses       writes of these kinds are refused, with the row as it is
    lose_replies  so many replies are lost, to writes of the kinds `losing`
    passes        called on the way of each write to the table, and again on the way back
    asked         each write, as it was asked for; of those that were answered, `outcomes` has the answers
    readings      the keys of each reading and whether it may be stale; None for all
    """

    def __init__(self, capabilities: Capabilities = PROMISES) -> None:
        super().__init__()
        self._promises = capabilities
        self.down = False
        self.fault: BaseException | None = None
        self.bad: set[str] = set()
        self.refuses: tuple[type[Write], ...] = ()
        self.lose_replies = 0
        self.losing: tuple[type[Write], ...] = get_args(LeaseChange)
        self.passes: Callable[[], None] = lambda: None
        self.writes: list[str] = []
        self.asked: list[Write] = []
        self.outcomes: list[Outcome] = []
        self.readings: list[tuple[tuple[str, ...] | None, bool]] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._promises

    def _progress(self) -> None:
        if self.down:
            raise OutcomeUnknown("the store cannot be reached")

    def list(self) -> Listing:
        self.readings.append((None, True))
        if self.fault is not None:
            raise self.fault
        self._progress()
        good = tuple(lease for lease in super().list().leases if lease.key not in self.bad)
        return Listing(good, tuple(Malformed(key, "notes", "is not JSON") for key in sorted(self.bad)))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, if reachable; nothing may be decided on a row that cannot be read."""
        wanted = tuple(keys)
        self.readings.append((wanted, stale_ok))
        self._progress()
        if self.bad.intersection(wanted):
            raise StoreError("lease s-0: notes: is not JSON")
        return super().get(wanted, stale_ok=stale_ok)

    def rewrite(self, key: str, change: Callable[[Lease], Lease]) -> None:
        """Change a row behind everybody's back."""
        self._table.rows[key] = change(self.row(key))

    def row(self, key: str) -> Lease:
        """A row as it is."""
        return super().get([key])[0]

    def write(self, write: Write) -> Outcome:
        """Apply it, if reachable; the reply to a new lease or a deletion is never lost."""
        self.asked.append(write)
        self._progress()
        self.passes()
        refused = isinstance(write, self.refuses)
        outcome = Lost(write.lease.key, self.row(write.lease.key)) if refused else super().write(write)
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
    """A stream that fails as a test says, and keeps its readers.

    faults         what the next listings raise; None stands for an answer
    on_read        called with each reading, and answers another one or None; where it raises, the reader is past it
    present        the position of LATEST, if it is one for all
    readers        those that were opened, and with `epochs` under which number of its lease
    """

    faults: list[SourceError | None] = field(factory=list)
    on_read: Callable[[Batch], Batch | None] = lambda _batch: None
    present: Position | None = None
    readers: list["FaultyReader"] = field(factory=list)
    epochs: list[int] = field(factory=list)

    def shards(self) -> tuple[Shard, ...]:
        """The listing, or the next fault."""
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        return super().shards()

    def latest(self, lease: Lease) -> Position:
        """Where it is told to be, or as of every list."""
        return super().latest(lease) if self.present is None else self.present

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that fails as its stream does."""
        self.readers.append(FaultyReader(self, super().open(lease, start)))
        self.epochs.append(lease.epoch)
        return self.readers[-1]


@define
class FaultyReader:
    """One reader of such a stream; nobody may read or close it once it is closed."""

    source: FaultySource
    reader: Reader
    closed: bool = False

    def read(self) -> Batch:
        """The next records, as the stream gives them."""
        assert not self.closed, "a reader that was closed is read"
        batch = self.reader.read()
        given = self.source.on_read(batch)
        return batch if given is None else given

    def close(self) -> None:
        assert not self.closed, "a reader is closed twice"
        self.closed = True
        self.reader.close()


@define
class ManualExecutor:
    """Threads for handlers that do nothing until the test says so.

    waiting   what was started and has not begun
    replaced  the slow work for which another thread was wanted
    stuck, refuses
              whether all threads are slow, and whether the system starts no more
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
        """Not once it has begun."""
        if work not in self.waiting:
            return False
        self.waiting.remove(work)
        return True

    def replace(self, work: Work) -> None:
        self.replaced.append(work)

    def close(self) -> None:
        """Nothing to close."""


def four_shards() -> list[Shard]:
    """A stream of four equal shards."""
    return even_shards(("s-0", "s-1", "s-2", "s-3"))


def stream_of_five() -> ListSource:
    """Four shards of five records each."""
    return ListSource(four_shards(), {f"s-{n}": ShardRecords(records(5)) for n in range(4)})


@define
class Kept:
    """A consumer that remembers what it was told; the test does the work.

    busy  a batch is in hand, so that nothing parts yet
    """

    begun: list[Holding] = field(factory=list)
    releasing: list[Holding] = field(factory=list)
    busy: bool = False

    def begin(self, holding: Holding) -> None:
        self.begun.append(holding)

    def release(self, holding: Holding) -> None:
        """Part at once, where nothing is running."""
        self.releasing.append(holding)
        if not self.busy:
            holding.release()


@define
class Driven:
    """One worker and its appointments under the test's clock."""

    worker: Worker
    clock: Clock
    renew_due: float = 0.0
    turn_due: float = 0.0
    each_renewal: BackgroundMap = map

    def run(self, seconds: float) -> None:
        """Keep its appointments for so long."""
        end = self.clock.now + seconds
        while min(self.renew_due, self.turn_due) <= end:
            self.clock.now = max(self.clock.now, min(self.renew_due, self.turn_due))
            self.step()
        self.clock.now = end

    def step(self) -> None:
        now = self.clock.now
        if self.renew_due <= now:
            self.renew_due = self.worker.renew(now, self.each_renewal)
        if self.turn_due <= now:
            self.turn_due = self.worker.turn(now)

    @property
    def held(self) -> list[str]:
        return [holding.key for holding in self.worker.holdings]


def member(  # noqa: PLR0917  a test names the last ones
    store: MemoryStore, source: ListSource, clock: Clock, me: str = "a-1", process: str = "p-1", config: Config = KCL
) -> Driven:
    """A worker that shares, with a consumer that remembers."""
    worker = Worker(store=store, source=source, me=me, config=config, consumer=Kept(), clock=clock, process=process)
    return Driven(worker, clock, clock.now, clock.now)


def together(members: list[Driven], seconds: float) -> None:
    """Keep the appointments of several workers in one order of time."""
    clock = members[0].clock
    end = clock.now + seconds
    while (due := min(min(each.renew_due, each.turn_due) for each in members)) <= end:
        clock.now = max(clock.now, due)
        for each in members:
            each.step()
    clock.now = end
