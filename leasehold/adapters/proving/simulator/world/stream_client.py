"""The stream as one process sees it: requests take time, and meet mishaps on the way."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from leasehold.adapters.proving.simulator.world.caller import Caller
from leasehold.adapters.proving.simulator.world.exchange import Exchange, Lies
from leasehold.adapters.proving.simulator.world.stream import ListSource
from leasehold.adapters.proving.simulator.world.world import World
from leasehold.adapters.sources.call_patience import LOOK_SECONDS, CallPatience, StillAsked, TimedClients
from leasehold.adapters.sources.protocol import Batch, Reader, SourceUnavailable
from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.balancer.model import Lease, Position, Shard

THROTTLED_SECONDS, AGAIN_SECONDS = 2.0, 0.4
SLOW_SECONDS = 6.0, 25.0


class StreamClient:
    """A source over the run's stream, at the other end of a network."""

    def __init__(self, world: World, caller: Caller, exchange: Exchange, time: Scheduler) -> None:
        self._slow, self._tasks = world.scenario.network.slow, world.tasks
        self.clients = TimedClients(
            partial(_TimedReading, self),
            world.scenario.network.patience,
            clock=time.clock,
            start=lambda work: time.start("leasehold-slow", work, lambda fault: time.unforeseen("slow call", fault)),
        )
        self._source: ListSource = world.source
        self._caller, self._exchange = caller, exchange
        self._least, self._most = world.scenario.network.reading
        self._first = tuple(world.source.listed)
        # Of its own, so that the table's faults stay as they were.
        self._draw = random.Random(f"stream {world.scenario.seed} {caller.process_id}")  # noqa: S311  a seed is the point

    @property
    def stream(self) -> str:
        """The name leases carry."""
        return self._source.stream

    def incarnation(self) -> str:
        """When the stream was made; asked only where a run makes it anew, or every run would be another one."""
        return str(self.ask("source.incarnation", self._source.incarnation)) if self._source.made else ""

    def shards(self) -> tuple[Shard, ...]:
        """The listing; a lie shows it as it was when this process started."""
        listed: tuple[Shard, ...] = self.ask("source.shards", self._source.shards, {"untrue": lambda: self._first})
        return listed

    def gone(self, shard: str) -> bool:
        """Whether the stream says so."""
        return bool(self.ask("source.gone", lambda: self._source.gone(shard)))

    def latest(self, lease: Lease) -> Position:
        """The position that LATEST means now, which moves on."""
        position: Position = self.ask("source.latest", lambda: self._source.latest(lease))
        return position

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader, at the other end of the same network."""
        reader: Reader = self.ask("source.open", lambda: self._source.open(lease, start))
        return DistantReader(self, reader)

    def close(self) -> None:
        """Nothing to close."""

    def ask(self, what: str, work: Callable[[], Any], lies: Lies | None = None) -> Any:  # noqa: ANN401  the call's own
        """Ask the stream, which answers what is so half-way."""

        def answered() -> Any:  # noqa: ANN401  likewise
            self._travel()
            answer = work()
            self._travel()
            return answer

        return self._exchange.call(what, answered, lies)

    @property
    def ever_slow(self) -> bool:
        """Whether there are times in which readings are answered late."""
        return bool(self._slow)

    def late(self, seconds: float) -> None:
        """Let the time pass that an answer takes now. Raises TimeoutError if that is longer than this."""
        if any(each.at <= self._tasks.now < each.at + each.seconds for each in self._slow):
            delay = self._draw.uniform(*SLOW_SECONDS)
            self._caller.wait(min(delay, seconds))
            if delay > seconds:
                raise TimeoutError

    def _travel(self) -> None:
        if self._most:
            self._caller.wait(self._draw.uniform(self._least, self._most) / 2)


class DistantReader:
    """A reader of the stream whose readings take time."""

    def __init__(self, client: StreamClient, reader: Reader) -> None:
        self._client, self._reader = client, reader
        self._patience = CallPatience(client.clients)

    def read(self) -> Batch:
        """The next records; where the stream may be slow, waited for as a reader of Kinesis does."""
        if not self._client.ever_slow:
            return self.read_once()
        try:
            batch: Batch = self._patience.ask("read", reader=self)
        except StillAsked:
            return Batch((), None, None, LOOK_SECONDS)
        except SourceUnavailable:
            return Batch((), None, None, AGAIN_SECONDS)
        return batch

    def read_once(self) -> Batch:
        """The next records; a lie is the empty answer of a service that asks to slow down."""
        throttled = Batch((), None, None, THROTTLED_SECONDS, fault="throttled")
        batch: Batch = self._client.ask("reader.read", self._reader.read, {"untrue": lambda: throttled})
        return batch

    def close(self) -> None:
        """Close it."""
        self._client.ask("reader.close", self._reader.close)


class _TimedReading:
    """Readings that are given up after so many seconds."""

    def __init__(self, client: StreamClient, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def read(self, reader: DistantReader) -> Batch:
        """Read once, unless the answer takes too long."""
        self._client.late(self._seconds)
        return reader.read_once()
