"""One process's connections to the store and the stream, over a simulated network with delays and faults.

1. A write is applied at one moment between its request and its response. A late write is applied after the caller has
   given up.
2. Whatever fault occurs, the process learns only that the outcome of its request is unknown.

`CallExchange` counts the calls of one process, and applies the faults that are planned for them. `TableClient` is its
store, and `StreamClient` its stream.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

from attrs import evolve

from leasehold.adapters.sources.call_timeouts import PENDING_CHECK_SECONDS, CallTimeouts, ResponsePending, TimedClients
from leasehold.adapters.sources.protocol import Batch, Reader
from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.balancer.model import Lease, Position, Shard, Version
from leasehold.errors import OutcomeUnknown, SourceUnavailable
from leasehold.stores import writes
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Outcome
from leasehold_lab.judge.events import VERBS, WriteEvent
from leasehold_lab.simulator.call_faults import (
    DENIED,
    DENIED_SECONDS,
    FREEZE_SECONDS,
    HANG_SECONDS,
    LATE_SECONDS,
    RAISED,
    CallEvent,
    create_generator,
)
from leasehold_lab.simulator.world.world import Caller, ListSource, SimulatedTable, UnitBudget, World

T = TypeVar("T")

PAUSE_SECONDS = 1.0

SubstituteResults = Mapping[str, Callable[[], Any]]
"""Functions that return a substitute for a call's result, by the name of the fault step that uses them."""


class CallExchange:
    """Makes the calls of one process, and applies the faults that are planned for them."""

    def __init__(self, world: World, caller: Caller) -> None:
        self._history, self._tasks, self._caller = world.history, world.tasks, caller
        self._full = world.scenario.full
        self._denied: dict[str, float] = {}
        self._planned = {call_fault.number: call_fault.fault for call_fault in world.scenario.call_faults}

    def make_call(self, call_name: str, action: Callable[[], Any], substitutes: SubstituteResults | None = None) -> Any:  # noqa: ANN401  the result of any call
        """Make the call, or apply the fault that is planned for it."""
        if not self._full:
            return action()
        calls = self._history.calls
        calls.append(CallEvent(self._tasks.now, self._caller.process_id, call_name))
        planned_fault = self._planned.get(len(calls) - 1)
        if planned_fault is None:
            # While a resource is denied, every call that needs it fails.
            for name, denied_until in self._denied.items():
                call_prefixes, exception = DENIED[name]
                if self._tasks.now < denied_until and call_name.startswith(call_prefixes):
                    raise exception()
            return action()
        result: Any = None
        wait_seconds_by_step = {"pause": PAUSE_SECONDS, "hang": HANG_SECONDS, "late": LATE_SECONDS}
        for step in planned_fault.split(" + "):
            match step.split():
                case ["do"]:
                    result = action()
                case ["raise", name]:
                    exception_to_raise = RAISED[name]()
                    raise exception_to_raise
                case ["deny", name]:
                    self._denied[name] = self._tasks.now + DENIED_SECONDS
                    exception_to_raise = DENIED[name][1]()
                    raise exception_to_raise
                case ["crash" | "restart"]:
                    self._caller.die(again=step == "restart")
                    self._caller.wait(0.0)
                case ["freeze"]:
                    self._caller.pause(FREEZE_SECONDS)
                case _ if step in wait_seconds_by_step:
                    self._caller.wait(wait_seconds_by_step[step])
                case _:
                    result = (substitutes or {})[step]()
        return result

    def call_user_function(self, name: str, user_callable: Callable[[], object]) -> Any:  # noqa: ANN401  a user's callable may return anything
        """Call a function that stands for a user's code."""
        return self.make_call(name, user_callable, {"answer": lambda: False, "generate": create_generator})


GIVE_UP_SECONDS = 1.0

WriteFault = Literal["lost", "unanswered", "late", "twice"]

OTHER_WORKER = "somebody-else"
STALE_SECONDS = 1.0

UNIT_BYTES = 8192
"""The bytes of a listing that one read unit pays for, with eventual consistency."""


class TableClient:
    """One process's client of a lease table. By default, this is the table of the run.

    Unless the run has swaps, the client records each write in the history at the moment when the table applies it.
    """

    def __init__(
        self,
        world: World,
        caller: Caller,
        exchange: CallExchange,
        rng: random.Random,
        table: SimulatedTable | None = None,
    ) -> None:
        self._exchange = exchange
        self._table, self._tasks, self._history = table or world.table, world.tasks, world.history
        self._records_writes = not world.scenario.swaps
        self._caller, self._draw, self._world = caller, rng, world
        self._network = network = world.scenario.network
        self._capacity = world.scenario.capacity
        self._dated = world.scenario.dated
        self._listed = self._table.list_with_ages if self._dated else self._table.list
        self._fault_free_after, self._full = world.scenario.calm, world.scenario.full
        # Each fault is stored with its cumulative probability, so that one random number selects among them.
        faults: tuple[tuple[WriteFault, float], ...] = (
            ("lost", network.lost),
            ("unanswered", network.unanswered),
            ("late", network.late),
            ("twice", network.twice),
        )
        cumulative_probabilities = accumulate(probability for _, probability in faults)
        self._faults = [
            (cumulative_probability, fault)
            for cumulative_probability, (fault, probability_of_fault) in zip(
                cumulative_probabilities, faults, strict=True
            )
            if probability_of_fault
        ]

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of DynamoDB or, if rows are dated, those of blobs, whose annotations cost requests."""
        return Capabilities(free_annotations=not self._dated)

    # Reading

    def list(self) -> Listing:
        """Return all leases. Some may be stale."""
        self._history.requests["list"] += 1

        def read_pages() -> Listing:
            start_time = self._tasks.now
            self._wait_for_network()
            listing = self._read_pages()
            self._wait_for_network()
            self._history.scanned += len(listing.leases)
            self._history.listings.append((start_time, self._tasks.now, self._caller.process_id))
            return self._make_stale_at_random(listing)

        return self._read_with_faults("store.list", read_pages)

    def _read_pages(self) -> Listing:
        """Read the pages of a listing one after another, at the speed that the table's capacity allows."""
        capacity, listing = self._capacity, self._listed()
        if capacity.bytes_per_second == capacity.table_units == math.inf:
            return listing
        keys, page_rows = [row.key for row in listing.leases], max(1, capacity.page_bytes // capacity.row_bytes)
        rows: list[Lease] = []
        for page_start in range(0, len(keys), page_rows):
            page_keys = keys[page_start : page_start + page_rows]
            bytes_read = len(page_keys) * capacity.row_bytes
            self._caller.wait(bytes_read / capacity.bytes_per_second)
            self._wait_for_capacity(self._world.reads, bytes_read / UNIT_BYTES)
            current_rows = {row.key: row for row in self._listed().leases}
            rows += [current_rows[key] for key in page_keys if key in current_rows]
        return Listing(tuple(rows))

    def _wait_for_capacity(self, budget: UnitBudget, units: float) -> None:
        """Wait until the table has capacity for this many units.

        Raises OutcomeUnknown if the wait exceeds the scenario's `patience_seconds`.
        """
        wait_seconds = budget.wait(units)
        if not wait_seconds:
            return
        self._caller.wait(min(wait_seconds, self._capacity.patience_seconds))
        if wait_seconds > self._capacity.patience_seconds:
            raise OutcomeUnknown("the table throttles requests")

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return the leases with these keys. They may be stale if `stale_ok` is True."""
        requested_keys = tuple(keys)
        self._history.requests["get"] += 1
        self._history.fetched += len(requested_keys)
        self._history.fetched_stale += len(requested_keys) if stale_ok else 0

        def read_requested_rows() -> Listing:
            self._wait_for_network()
            if self._capacity.row_units < math.inf:
                for key in requested_keys:
                    budget = UnitBudget(self._capacity.row_units, lambda: self._tasks.now)
                    self._wait_for_capacity(self._world.row_reads.setdefault(key, budget), 0.5 if stale_ok else 1.0)
            listing = Listing(self._table.get(requested_keys))
            self._wait_for_network()
            return self._make_stale_at_random(listing) if stale_ok else listing

        return self._read_with_faults("store.get", read_requested_rows, stale_ok=stale_ok).leases

    def _read_with_faults(self, call_name: str, read: Callable[[], Listing], *, stale_ok: bool = True) -> Listing:
        """Read, with planned faults applied. A consistent read never returns wrong rows, as with the real service."""

        def return_stale_rows() -> Listing:
            return self._table.with_earlier_rows(read(), STALE_SECONDS, lambda: stale_ok)

        def return_wrong_rows() -> Listing:
            listing = read()
            return Listing(tuple(evolve(row, owner=OTHER_WORKER) for row in listing.leases)) if stale_ok else listing

        listing: Listing = self._exchange.make_call(
            call_name, read, {"stale": return_stale_rows, "untrue": return_wrong_rows}
        )
        return listing

    def _make_stale_at_random(self, listing: Listing) -> Listing:
        rng, stale_probability = self._draw, self._network.stale
        if not stale_probability or self._tasks.now >= self._fault_free_after or rng.random() >= stale_probability:
            return listing
        return self._table.with_earlier_rows(listing, rng.random(), lambda: bool(rng.getrandbits(1)))

    # Writing

    def write(self, write: writes.Write) -> Outcome:
        """Send the write over the network, and return its outcome."""
        verb, key = VERBS[type(write)], write.lease.key
        self._history.requests[verb] += 1
        sent_time = self._tasks.now
        if self._caller.foreign:
            # Another library steals only if the version is unchanged, and does not write our attributes.
            match write:
                case writes.ClaimLease(lease, me) | writes.StealLease(lease, me):
                    write = writes.ClaimLease(lease, me)
                case writes.RenewLease(lease):
                    write = writes.RenewLease(lease)
                case _:
                    pass

        def apply_write() -> Outcome:
            row_before = self._table.find_row(key)
            outcome = self._table.write(write)
            is_applied = isinstance(outcome, Done)
            if is_applied and self._caller.foreign and isinstance(write, writes.ClaimLease):
                # The row must also show that its new owner does not answer hand-off requests.
                outcome = self._table.mark_unresponsive(key)
            if self._records_writes and (self._full or verb != "renew" or not is_applied):
                row_after = outcome.lease if is_applied and verb != "delete" else self._table.find_row(key)
                worker_and_process = self._caller.worker_id, self._caller.process_id
                self._history.writes.append(
                    WriteEvent(
                        self._tasks.now, sent_time, *worker_and_process, verb, key, row_before, row_after, is_applied
                    )
                )
            return outcome

        def reject_write() -> Outcome:
            row = self._table.find_row(key)
            return Lost(key, row and evolve(row, owner=OTHER_WORKER, version=Version("another")))

        substitutes = {"untrue": reject_write, "send": lambda: self._apply_later(apply_write, LATE_SECONDS)}
        outcome: Outcome = self._exchange.make_call(f"store.{verb}", lambda: self._send_write(apply_write), substitutes)
        return outcome

    def close(self) -> None:
        """Do nothing, because the simulated connection has nothing to close."""

    # Transport

    def read_through(self, call_name: str, compute: Callable[[], T]) -> T:
        """Send a read to the table, and return the result. `compute` runs when the request arrives."""

        def compute_on_arrival() -> T:
            self._wait_for_network()
            value = compute()
            self._wait_for_network()
            return value

        result: T = self._exchange.make_call(call_name, compute_on_arrival)
        return result

    def write_through(self, call_name: str, apply: Callable[[], T]) -> T:
        """Send a write of a row that is not a lease. `apply` runs when the request arrives."""
        substitutes = {"send": lambda: self._apply_later(apply, LATE_SECONDS)}
        result: T = self._exchange.make_call(call_name, lambda: self._send_write(apply), substitutes)
        return result

    def _send_write(self, apply: Callable[[], T]) -> T:
        """Send a write over the network, with a random fault. `apply` changes the table when the write arrives."""
        fault: WriteFault | None = None
        if self._faults and self._tasks.now < self._fault_free_after:
            random_number = self._draw.random()
            fault = next(
                (fault for cumulative_probability, fault in self._faults if random_number < cumulative_probability),
                None,
            )
        if fault == "lost":
            self._caller.wait(GIVE_UP_SECONDS)
            raise OutcomeUnknown("the request was lost")
        if fault == "late":
            self._apply_later(apply, self._draw.uniform(0.0, self._network.late_seconds))
            self._caller.wait(GIVE_UP_SECONDS)
            raise OutcomeUnknown("there was no response in time")
        self._wait_for_network()
        self._wait_for_capacity(self._world.writes, 1.0)
        outcome = apply()
        if fault == "unanswered":
            self._caller.wait(GIVE_UP_SECONDS)
            raise OutcomeUnknown("the response was lost")
        if fault == "twice":
            self._caller.wait(GIVE_UP_SECONDS)
            outcome = apply()
        self._wait_for_network()
        return outcome

    def _apply_later(self, apply: Callable[[], object], seconds: float) -> None:
        # The write arrives in a separate task, because the process may be dead by then.
        def apply_on_arrival() -> None:
            apply()

        self._tasks.start(apply_on_arrival, self._tasks.now + seconds)

    def _wait_for_network(self) -> None:
        """Wait as long as a message takes in one direction, which is half of a request's latency."""
        rng, network = self._draw, self._network
        shortest, longest = network.latency
        travel_seconds = (shortest + (longest - shortest) * rng.random()) / 2
        if self._tasks.now < self._fault_free_after:
            if rng.random() < network.stall / 2:
                travel_seconds += 1.0 + 2.0 * rng.random()
            if any(0 <= self._tasks.now - outage.at < outage.seconds for outage in network.outages):
                self._caller.wait(GIVE_UP_SECONDS)
                raise OutcomeUnknown("the table cannot be reached")
        self._caller.wait(travel_seconds)


THROTTLED_SECONDS, AGAIN_SECONDS = 2.0, 0.4
SLOW_SECONDS = 6.0, 25.0


class StreamClient:
    """One process's connection to the run's stream, over the simulated network."""

    def __init__(self, world: World, caller: Caller, exchange: CallExchange, scheduler: Scheduler) -> None:
        self._slow, self._tasks = world.scenario.network.slow, world.tasks
        self.clients = TimedClients(
            partial(_TimedReader, self),
            world.scenario.network.patience,
            clock=scheduler.clock,
            start=lambda work: scheduler.start(
                "leasehold-slow", work, lambda fault: scheduler.log_unexpected("slow call", fault)
            ),
        )
        self._source: ListSource = world.source
        self._caller, self._exchange = caller, exchange
        self._least, self._most = world.scenario.network.reading
        self._first = tuple(world.source.listed)
        # A separate generator, so that requests to the stream don't change the random faults of the table.
        self._draw = random.Random(f"stream {world.scenario.seed} {caller.process_id}")  # noqa: S311  seeded, so that the run can be repeated

    @property
    def stream(self) -> str:
        """The name of the stream, as it stands in leases."""
        return self._source.stream

    def incarnation(self) -> str:
        """Return the stream's incarnation. If the run does not recreate the stream, return "" without a request."""
        return str(self.send_request("source.incarnation", self._source.incarnation)) if self._source.made else ""

    def shards(self) -> tuple[Shard, ...]:
        """Return the shards. The fault "untrue" returns those that were listed when this process started."""
        shards_listed: tuple[Shard, ...] = self.send_request(
            "source.shards", self._source.shards, {"untrue": lambda: self._first}
        )
        return shards_listed

    def gone(self, shard: str) -> bool:
        """Return whether the stream reports the shard as gone."""
        return bool(self.send_request("source.gone", lambda: self._source.gone(shard), shard=shard))

    def latest(self, lease: Lease) -> Position:
        """Return the position that LATEST means at this moment."""
        position: Position = self.send_request("source.latest", lambda: self._source.latest(lease), shard=lease.shard)
        return position

    def open(self, lease: Lease, start: Position) -> Reader:
        """Return a reader of the lease's shard, whose reads go over the same network."""
        reader: Reader = self.send_request("source.open", lambda: self._source.open(lease, start), shard=lease.shard)
        return RemoteReader(self, reader, lease.shard)

    def close(self) -> None:
        """Do nothing, because the simulated connection has nothing to close."""

    def send_request(
        self,
        call_name: str,
        action: Callable[[], Any],
        substitutes: SubstituteResults | None = None,
        *,
        shard: str = "",
    ) -> Any:  # noqa: ANN401  the result of any call
        """Send a request to the stream. `action` runs when the request arrives.

        `shard` is the id of the shard that the request concerns, or "" if it concerns none.
        """

        def perform_action() -> Any:  # noqa: ANN401  the result of any call
            self._caller.wait_if_deaf(shard)
            self._wait_for_network()
            result = action()
            self._wait_for_network()
            return result

        return self._exchange.make_call(call_name, perform_action, substitutes)

    @property
    def has_slow_periods(self) -> bool:
        """Whether the scenario has periods in which reads are slow."""
        return bool(self._slow)

    def wait_if_slow(self, seconds: float) -> None:
        """If the stream is slow now, wait as long as a slow response takes. Raises TimeoutError after `seconds`."""
        if any(period.at <= self._tasks.now < period.at + period.seconds for period in self._slow):
            delay_seconds = self._draw.uniform(*SLOW_SECONDS)
            self._caller.wait(min(delay_seconds, seconds))
            if delay_seconds > seconds:
                raise TimeoutError

    def _wait_for_network(self) -> None:
        if self._most:
            self._caller.wait(self._draw.uniform(self._least, self._most) / 2)


class RemoteReader:
    """A reader of the stream whose reads go over the simulated network."""

    def __init__(self, client: StreamClient, reader: Reader, shard: str) -> None:
        self._client, self._reader, self._shard = client, reader, shard
        self._timeouts = CallTimeouts(client.clients)

    def read(self) -> Batch:
        """Return the next records. If the scenario has slow periods, use the same timeouts as a Kinesis reader."""
        if not self._client.has_slow_periods:
            return self.read_once()
        try:
            batch: Batch = self._timeouts.try_call("read", reader=self)
        except ResponsePending:
            return Batch((), None, None, PENDING_CHECK_SECONDS, fault="not answered yet")
        except SourceUnavailable as exc:
            return Batch((), None, None, AGAIN_SECONDS, fault=str(exc))
        return batch

    def read_once(self) -> Batch:
        """Return the next records. The fault "untrue" returns an empty batch, as if the service throttled the read."""
        throttled_batch = Batch((), None, None, THROTTLED_SECONDS, fault="throttled")
        batch: Batch = self._client.send_request(
            "reader.read", self._reader.read, {"untrue": lambda: throttled_batch}, shard=self._shard
        )
        return batch

    def close(self) -> None:
        """Close the reader."""
        self._client.send_request("reader.close", self._reader.close, shard=self._shard)


class _TimedReader:
    """A client whose reads time out after `seconds`."""

    def __init__(self, client: StreamClient, seconds: float) -> None:
        self._client, self._seconds = client, seconds

    def read(self, reader: RemoteReader) -> Batch:
        """Read once. Raises TimeoutError if a slow response would take longer than the client's timeout."""
        self._client.wait_if_slow(self._seconds)
        return reader.read_once()
