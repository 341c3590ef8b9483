"""Tests leases and jobs in PostgreSQL: the store fulfills the contract, and no job is skipped."""

from collections.abc import Iterator
from queue import Queue
from threading import Thread
from uuid import uuid4

import pytest
from postgres_jobs import SCHEMA, Jobs
from postgres_leases import PostgresLeases
from psycopg import connect

from leasehold import TRIM_HORIZON, Config, Lease, Position
from leasehold.adapters import Delivery, Runner, Worker
from leasehold.stores import Store
from leasehold.testing import leasehold_store_contract

pytestmark = pytest.mark.services


@pytest.fixture
def database(conninfo: str) -> Iterator[str]:
    """Create a schema for one test, and drop it afterwards."""
    name = f"s{uuid4().hex}"
    with connect(conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{conninfo} options='-c search_path={name}'"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


def leases(database: str) -> Store:
    return PostgresLeases(database)


TestPostgres = leasehold_store_contract(leases)
"""Runs every clause of the store contract on one table."""


def test_job_that_commits_late_is_not_skipped(database: str) -> None:
    """The ids of jobs that commit earlier may be higher, so reading waits for open transactions with lower ids."""
    with connect(database, autocommit=True) as connection:
        connection.execute(SCHEMA)
    jobs = Jobs(database, 1)
    reader = jobs.open(Lease("bucket-0"), TRIM_HORIZON)
    with connect(database) as slow_connection, connect(database) as fast_connection:
        slow_connection.execute("INSERT INTO jobs (bucket, work) VALUES (0, 'slow')")
        fast_connection.execute("INSERT INTO jobs (bucket, work) VALUES (0, 'fast')")
        fast_connection.commit()
        assert reader.read().records == []  # an earlier transaction is still open
        slow_connection.commit()
        batch = reader.read()
    assert [record.data for record in batch.records] == [b"slow", b"fast"]
    assert batch.end is not None
    assert jobs.open(Lease("bucket-0"), batch.end).read().records == []
    first_position = batch.records[0].position
    assert [record.data for record in jobs.open(Lease("bucket-0"), first_position).read().records] == [b"fast"]
    assert jobs.open(Lease("bucket-0"), jobs.latest(Lease("bucket-0"))).read().records == []
    assert first_position.order < batch.end.order < Position("9" * 20).order
    jobs.close()


def test_worker_handles_the_jobs_of_every_bucket_in_order(database: str) -> None:
    with connect(database, autocommit=True) as connection:
        connection.execute(SCHEMA)
        for number in range(20):
            connection.execute("INSERT INTO jobs (bucket, work) VALUES (%s, %s)", (number % 2, str(number)))
    handled_jobs: Queue[tuple[str, int]] = Queue()

    def handle(batch: Delivery) -> None:
        for record in batch.records:
            handled_jobs.put((batch.shard, int(record.data)))

    store, jobs = PostgresLeases(database), Jobs(database, 2)
    worker = Worker(store=store, source=jobs, me="w-1", config=Config(initial_position=TRIM_HORIZON))
    runner = Runner(worker, handle)
    thread = Thread(target=runner.run)
    thread.start()
    try:
        finished_jobs = [handled_jobs.get(timeout=60) for _ in range(20)]
    finally:
        runner.stop()
        thread.join()
    for number in range(2):
        assert [job for bucket, job in finished_jobs if bucket == f"bucket-{number}"] == list(range(number, 20, 2))
    assert all(lease.checkpoint.numbered for lease in store.list().leases if lease.shard.startswith("bucket"))
    store.close()
    jobs.close()
