"""Makes several processes claim the same leases at the same moment."""

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
FORK_SERVER = get_context("forkserver")
"""Starts children from a process that has no connections to services. Children that were forked from the test process
would share its connections.
"""
# Import these modules once, in the fork server. Importing them in every child would take a second of CPU time each.
FORK_SERVER.set_forkserver_preload(["__main__", *(f"leasehold.stores.{name}" for name in STORES)])

_gates: list[Barrier] = []


def _prepare(gate: Barrier, environment: Mapping[str, str]) -> None:
    _gates.append(gate)
    os.environ.update(environment)  # The fork server still has the environment of the first race.


def _claims(url: str, worker_name: str) -> tuple[str, ...]:
    store = open_store(url)
    leases = store.get(KEYS)
    _gates[0].wait(timeout=60)
    return tuple(lease.key for lease in leases if isinstance(store.write(ClaimLease(lease, worker_name)), Done))


def wins(url: str) -> Iterator[tuple[str, str]]:
    """Yield the lease key and the worker of every successful claim, over all processes."""
    with closing(open_store(url)) as store:
        for key in KEYS:
            store.write(CreateLease(Lease(key)))
    gate = FORK_SERVER.Barrier(PROCESSES)
    with ProcessPoolExecutor(PROCESSES, FORK_SERVER, _prepare, (gate, dict(os.environ))) as pool:
        workers = tuple(f"w-{number}" for number in range(PROCESSES))
        for worker_name, keys in zip(workers, pool.map(_claims, [url] * PROCESSES, workers), strict=True):
            yield from ((key, worker_name) for key in keys)


def assert_one_winner_per_lease(url: str) -> None:
    """Assert that every lease was claimed by exactly one worker, the one that the store shows as its owner."""
    won = sorted(wins(url))
    assert [key for key, _ in won] == list(KEYS)
    with closing(open_store(url)) as store:
        assert won == [(lease.key, lease.owner) for lease in store.get(KEYS)]
