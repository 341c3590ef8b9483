"""The queue of a shard: its records in order, the aggregate under way, and the rate at which it may write."""

from collections import deque
from collections.abc import Iterable
from heapq import merge

from attrs import define, field, frozen

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.balancer.model import HashRange

SHARD_BYTES_PER_SECOND = 1 << 20
SHARD_RECORDS_PER_SECOND = 1000


@define(eq=False)  # what is frozen would take four times as long to make, and nothing is made as often
class Entry:
    """A user record that waits for its shard or is under way to it.

    ticket    its number among all records of this producer
    hash_key  decides its shard
    explicit  the explicit hash key, if the caller gave one
    arrived   seconds, by the caller's clock
    expires   after this it is late
    """

    ticket: int
    data: bytes
    partition_key: str
    hash_key: int
    explicit: str | None
    arrived: float
    expires: float

    @property
    def size(self) -> int:
        """The bytes that the record adds to a queue, about."""
        return len(self.data) + len(self.partition_key)


@frozen(eq=False)
class Unit:
    """A Kinesis record: accepted, or sent again, as a whole.

    shard     where it is meant to go
    entries   its user records, in order
    hash_key  of the first, which decides where it goes
    """

    shard: str
    entries: tuple[Entry, ...]
    data: bytes
    partition_key: str
    hash_key: int

    @property
    def size(self) -> int:
        """Bytes, as Kinesis counts them."""
        return len(self.data) + len(self.partition_key.encode())


@define
class Bucket:
    """The bytes and records that may be written; one Kinesis record may overdraw them, and the next one waits.

    share  of the shard's rate, 1.0 for all of it
    """

    share: float
    at: float = 0.0
    bytes: float = field(default=float(SHARD_BYTES_PER_SECOND))
    records: float = field(default=float(SHARD_RECORDS_PER_SECOND))

    def take(self, size: int, now: float) -> None:
        """Subtract a Kinesis record of this size."""
        passed = max(0.0, now - self.at) * self.share
        self.at = max(self.at, now)
        self.bytes = min(SHARD_BYTES_PER_SECOND, self.bytes + passed * SHARD_BYTES_PER_SECOND) - size
        self.records = min(SHARD_RECORDS_PER_SECOND, self.records + passed * SHARD_RECORDS_PER_SECOND) - 1

    @property
    def ready(self) -> float:
        """The time when nothing is overdrawn."""
        owed = max(-self.bytes / SHARD_BYTES_PER_SECOND, -self.records / SHARD_RECORDS_PER_SECOND, 0.0)
        return self.at + owed / self.share if owed else 0.0


@define(eq=False)
class ShardQueue:
    """The records of a shard, oldest first, and at most one unit under way.

    unit    sent, or to be sent again before anything else
    sent    since when the unit has been with the service; None while it waits here
    landed  (shard, sequence number) where it went, while the map cannot tell whether that was right
    wait    until then nothing is sent
    faults  refusals in a row
    """

    shard: str
    hash_range: HashRange
    bucket: Bucket
    queue: deque[Entry] = field(factory=deque)
    queued: int = 0
    unit: Unit | None = None
    sent: float | None = None
    landed: tuple[str, str] | None = None
    wait: float = 0.0
    faults: int = 0

    def append(self, entry: Entry) -> None:
        """The newest record."""
        self.queue.append(entry)
        self.queued += len(entry.data) + len(entry.partition_key)  # its size, without a call

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Records that were on their way, to their places by age: merged shards have two pasts."""
        self.queue = deque(merge(entries, self.queue, key=_ticket))
        self.queued = sum(entry.size for entry in self.queue)

    def shift(self) -> Entry:
        """The oldest record."""
        entry = self.queue.popleft()
        self.queued -= entry.size
        return entry

    def pack(self, size: int) -> Unit:
        """A unit of at most `size` bytes from the oldest records; a larger record travels alone."""
        alone = len(self.queue[0].data) + len(self.queue[0].partition_key.encode())
        aggregate = Aggregate(max(size, alone))
        entries: list[Entry] = []
        while self.queue and aggregate.add((entry := self.queue[0]).data, entry.partition_key, entry.explicit):
            entries.append(self.queue.popleft())
        self.queued -= sum(entry.size for entry in entries)
        return Unit(self.shard, tuple(entries), aggregate.sealed(), aggregate.partition_key, entries[0].hash_key)


def _ticket(entry: Entry) -> int:
    return entry.ticket
