"""Simulates two special kinds of lease tables: the layout `sessions`, and a swap between two tables.

In layout `sessions`, the real store runs on rows that it reaches through the simulated network. Requests are counted by
the kind of row that they write, because their price depends on that kind.

In a swap, a process reaches both tables through the network, and `run_swaps` does the work of `leasehold swap`. A table
doesn't know which of its rows are valid, so the history contains the writes as the processes saw them.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import count, pairwise
from typing import Literal, TypeVar

from attrs import evolve

from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Done, Outcome, PassingStore, Store
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, StoredObject
from leasehold.stores.sessions.group import SyncPrimitives
from leasehold.stores.sessions.rows import lease_row_name
from leasehold.stores.sessions.store import SessionStore
from leasehold.stores.swap import CONTROL_INTERVAL_SECONDS, CONTROL_KEY, DIRECTION, FROM, TO, SwapStore, split_version
from leasehold.stores.writes import AnnotateLease, CheckpointLease, RenewLease, Write
from leasehold_lab.judge.events import VERBS, WriteAnswer, WriteEvent
from leasehold_lab.simulator.world.client import TableClient
from leasehold_lab.simulator.world.world import Caller, World

T = TypeVar("T")


class RemoteCells:
    """One process's connection to the rows of the table, through the simulated network."""

    page_leases = PAGE_LEASES

    def __init__(self, world: World, client: TableClient) -> None:
        self._versioned_rows, self._history, self._client = world.cells, world.history, client
        self._last_etags: dict[str, str] = {}

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        """Return all rows whose names begin with one of the prefixes."""
        self._history.requests["list"] += 1
        rows = self._client.read_through(
            "store.list", lambda: self._versioned_rows.list(*prefixes, consistent=consistent)
        )
        self._history.scanned += len(rows)
        # An object store lists only names and versions, so a worker must then read the changed objects.
        self._history.changed_since_listed += sum(self._last_etags.get(row.name) != row.etag for row in rows)
        self._last_etags = {row.name: row.etag for row in rows}
        return rows

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        """Return the named cells that exist."""
        self._history.requests["get"] += 1
        self._history.fetched += len(names)
        self._history.fetched_stale += len(names) if stale_ok else 0
        return self._client.read_through("store.get", lambda: self._versioned_rows.read(names)) if names else {}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a cell, and return its version, or None if the cell already exists."""
        return self._write_cell(name, lambda: self._versioned_rows.put_if_absent(name, fields))

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a cell if it still has this version, and return the new version; otherwise return None."""
        return self._write_cell(name, lambda: self._versioned_rows.put_if_match(name, fields, version))

    def delete(self, name: str, version: str) -> bool:
        """Delete a cell if it still has this version, and return whether it is gone."""
        return self._write_cell(name, lambda: self._versioned_rows.delete(name, version))

    def prove(self) -> None:
        """Do nothing, because the simulated table always checks the conditions of writes."""

    def close(self) -> None:
        """Do nothing, because the simulated connection has nothing to close."""

    def _write_cell(self, name: str, apply: Callable[[], T]) -> T:
        row_kind = name.partition("/")[0]
        self._history.requests[row_kind] += 1
        return self._client.write_through(f"store.{row_kind}", apply)


def open_session_store(world: World, caller: Caller, client: TableClient, sync: SyncPrimitives) -> SessionStore:
    """Return the store of one process. No two of its sessions have the same id."""
    session_numbers = count(1)
    return SessionStore(
        RemoteCells(world, client), sync=sync, make_session_id=lambda: f"{caller.process_id}-{next(session_numbers)}"
    )


class SessionClient(PassingStore):
    """The store of one process, which records the writes of leases in the history."""

    def __init__(self, world: World, caller: Caller, client: TableClient, sync: SyncPrimitives) -> None:
        super().__init__(open_session_store(world, caller, client, sync))
        self._world, self._caller = world, caller
        self._actual_store = SessionStore(world.cells, sync=sync)

    def write(self, write: Write) -> Outcome:
        """Apply or reject the write, and record it in the history."""
        world, key, verb = self._world, write.lease.key, VERBS[type(write)]
        is_recorded = world.scenario.full or not isinstance(write, RenewLease | CheckpointLease)
        is_recorded = is_recorded or (isinstance(write, CheckpointLease) and write.position.ended)
        sent_time, row_before = world.tasks.now, self._read_row(key) if is_recorded else None
        outcome = self._store.write(write)
        if is_recorded:
            is_applied = isinstance(outcome, Done)
            row_after = outcome.lease if is_applied and verb != "delete" else self._read_row(key)
            worker_and_process = self._caller.worker_id, self._caller.process_id
            world.history.writes.append(
                WriteEvent(
                    world.tasks.now, sent_time, *worker_and_process, verb, key, row_before, row_after, is_applied
                )
            )
        return outcome

    def _read_row(self, key: str) -> Lease | None:
        cells = self._world.cells.read([lease_row_name(key)])
        return next(iter(self._actual_store.get([key])), None) if cells else None


NAMES = ("memory://from", "memory://to")


class SwapClient(PassingStore):
    """One process's store over the two tables of a swap. It records when each write was sent and answered.

    `first_table` and `second_table` are the clients of the two tables.
    """

    def __init__(
        self, world: World, caller: Caller, first_table: TableClient, second_table: TableClient, scheduler: Scheduler
    ) -> None:
        second_store: Store = (
            open_session_store(world, caller, second_table, scheduler) if world.scenario.sessions else second_table
        )
        super().__init__(SwapStore((first_table, second_store), NAMES[TO], clock=scheduler.clock))
        self._world, self._caller = world, caller

    def write(self, write: Write) -> Outcome:
        """Apply or reject the write, and record its outcome, which is unknown if an exception is raised."""
        sent_time = self._world.tasks.now
        try:
            outcome = super().write(write)
        except BaseException:
            self._record_answer(write, sent_time, None)
            raise
        self._record_answer(write, sent_time, outcome)
        return outcome

    def _record_answer(self, write: Write, sent_time: float, outcome: Outcome | None) -> None:
        lease = write.lease
        row = None if outcome is None else outcome.lease
        result: Literal["done", "lost", "unknown"] = (
            "unknown" if outcome is None else "done" if isinstance(outcome, Done) else "lost"
        )
        answer = WriteAnswer(
            self._world.tasks.now,
            sent_time,
            self._caller.process_id,
            VERBS[type(write)],
            lease.shard,
            result,
            seen=lease.owner,
        )
        if row is not None:
            checkpoint, version = row.checkpoint.order, str(row.version)
            answer = evolve(answer, owner=row.owner, version=version, epoch=row.epoch, checkpoint=checkpoint)
        self._world.history.answers.append(answer)


def run_swaps(world: World) -> None:
    """Start a swap at each of the scenario's times, alternating between the tables, and move unowned leases.

    This function does the work of `leasehold swap`. Owners move the leases that they hold.
    """
    second_store: Store = SessionStore(world.cells, gather_seconds=0.0) if world.scenario.sessions else world.goal
    store = SwapStore((world.table, second_store), NAMES[TO], clock=lambda: world.tasks.now)
    for swap_index, (swap_at, next_swap_at) in enumerate(pairwise((*world.scenario.swaps, world.scenario.seconds))):
        world.tasks.sleep_until(swap_at)
        target_table = FROM if swap_index % 2 else TO
        (control_row,) = second_store.get([CONTROL_KEY])
        second_store.write(AnnotateLease(control_row, DIRECTION, ("from", "to")[target_table]))
        while world.tasks.now < next_swap_at:
            leases = store.list().leases
            if {split_version(lease)[:2] for lease in leases} == {(target_table, False)}:
                world.history.swaps.append((swap_at, world.tasks.now))
                break
            for lease in leases:
                if lease.owner is None:
                    store.move_unowned(lease, target_table)
            world.tasks.sleep(CONTROL_INTERVAL_SECONDS)
