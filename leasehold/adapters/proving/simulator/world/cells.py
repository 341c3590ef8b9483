"""Layout `sessions` in a simulated fleet: the real store over rows at the other end of the network.

Requests are counted by the kind of row that they write, for what they cost depends on it.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import TypeVar

from leasehold.adapters.history.events import VERBS, WriteEvent
from leasehold.adapters.proving.simulator.world.client import Client
from leasehold.adapters.proving.simulator.world.world import Caller, World
from leasehold.balancer.model import Lease
from leasehold.stores import writes
from leasehold.stores.protocol import Done, Outcome, PassingStore
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Stored
from leasehold.stores.sessions.group import Pace
from leasehold.stores.sessions.rows import lease_name
from leasehold.stores.sessions.store import SessionStore

T = TypeVar("T")


class DistantCells:
    """The rows of the run's table, as one process asks for them."""

    page_leases = PAGE_LEASES

    def __init__(self, world: World, client: Client) -> None:
        self._cells, self._history, self._client = world.cells, world.history, client
        self._listed: dict[str, str] = {}

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:
        """Every row that begins so."""
        self._history.requests["list"] += 1
        found = self._client.asked("store.list", lambda: self._cells.list(*prefixes, certain=certain))
        self._history.scanned += len(found)
        # Where a listing names objects and not their content, those that changed are read.
        self._history.refetched += sum(self._listed.get(one.name) != one.etag for one in found)
        self._listed = {one.name: one.etag for one in found}
        return found

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:
        """The cells that are there."""
        self._history.requests["get"] += 1
        self._history.fetched += len(names)
        self._history.glimpsed += len(names) if stale_ok else 0
        return self._client.asked("store.get", lambda: self._cells.read(names)) if names else {}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Where there is none."""
        return self._written(name, lambda: self._cells.put_new(name, fields))

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Over this one."""
        return self._written(name, lambda: self._cells.put_over(name, fields, version))

    def delete(self, name: str, version: str) -> bool:
        """Delete this cell."""
        return self._written(name, lambda: self._cells.delete(name, version))

    def prove(self) -> None:
        """Nothing to prove: conditions are kept."""

    def close(self) -> None:
        """Nothing to close."""

    def _written(self, name: str, apply: Callable[[], T]) -> T:
        kind = name.partition("/")[0]
        self._history.requests[kind] += 1
        return self._client.written(f"store.{kind}", apply)


def sessions_of(world: World, caller: Caller, client: Client, pace: Pace) -> SessionStore:
    """The store of one process; the ids of its sessions never come again."""
    numbers = count(1)
    return SessionStore(DistantCells(world, client), pace=pace, ids=lambda: f"{caller.process_id}-{next(numbers)}")


class SessionClient(PassingStore):
    """The store of one process, which tells the history what changed owners."""

    def __init__(self, world: World, caller: Caller, client: Client, pace: Pace) -> None:
        super().__init__(sessions_of(world, caller, client, pace))
        self._world, self._caller = world, caller
        self._truth = SessionStore(world.cells, pace=pace)

    def write(self, write: writes.Write) -> Outcome:
        """Write as the store does, and tell the history."""
        world, key, verb = self._world, write.lease.key, VERBS[type(write)]
        told = world.scenario.full or not isinstance(write, writes.RenewLease | writes.CheckpointLease)
        told = told or (isinstance(write, writes.CheckpointLease) and write.position.ended)
        sent, before = world.tasks.now, self._row(key) if told else None
        outcome = self._store.write(write)
        if told:
            done = isinstance(outcome, Done)
            after = outcome.lease if done and verb != "delete" else self._row(key)
            who = self._caller.worker_id, self._caller.process_id
            world.history.writes.append(WriteEvent(world.tasks.now, sent, *who, verb, key, before, after, done))
        return outcome

    def _row(self, key: str) -> Lease | None:
        there = self._world.cells.read([lease_name(key)])
        return next(iter(self._truth.get([key])), None) if there else None
