"""Lets several processes claim the same leases at the same moment."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier

from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Done
from leasehold.stores.urls import open_store
from leasehold.stores.writes import ClaimLease, CreateLease

PROCESSES = 4
KEYS = tuple(f"shard-{number:02}" for number in range(20))
STORES = ("dynamodb.store", "embedded.sqlite", "postgres", "objects.blob")
CLEAN = get_context("forkserver")
"""Children of a process that has spoken with no service: of the tests' own they would share the connections."""
# Imported once in the fork server, because an import per child took a second of CPU time.
CLEAN.set_forkserver_preload(["__main__", *(f"leasehold.stores.{name}" for name in STORES)])

_gates: list[Barrier] = []


def _prepare(gate: Barrier, environment: Mapping[str, str]) -> None:
    _gates.append(gate)
    os.environ.update(environment)  # their environment is that of the first race


def _claims(url: str, me: str) -> tuple[str, ...]:
    store = open_store(url)
    seen = store.get(KEYS)
    _gates[0].wait(timeout=60)
    return tuple(lease.key for lease in seen if isinstance(store.write(ClaimLease(lease, me)), Done))


def wins(url: str) -> Iterator[tuple[str, str]]:
    """Return (key, worker) for every claim that was answered with Done, over all processes."""
    with closing(open_store(url)) as store:
        for key in KEYS:
            store.write(CreateLease(Lease(key)))
    gate = CLEAN.Barrier(PROCESSES)
    with ProcessPoolExecutor(PROCESSES, CLEAN, _prepare, (gate, dict(os.environ))) as pool:
        workers = tuple(f"w-{number}" for number in range(PROCESSES))
        for me, keys in zip(workers, pool.map(_claims, [url] * PROCESSES, workers), strict=True):
            yield from ((key, me) for key in keys)


def assert_one_winner_each(url: str) -> None:
    """Assert that every lease was won once, by the worker that the store shows as its owner."""
    won = sorted(wins(url))
    assert [key for key, _ in won] == list(KEYS)
    with closing(open_store(url)) as store:
        assert won == [(lease.key, lease.owner) for lease in store.get(KEYS)]
