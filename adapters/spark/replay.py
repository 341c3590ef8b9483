"""Reads again exactly what an offset says: Spark repeats a batch that it had planned and not finished.

A repeated batch has of each shard the same rows or, where they are past retention or somebody else reads
exclusively, none, and never more: a sink that skips a batch it knows would lose what only the repetition
had. A shard that gave none goes on at its lease's checkpoint, so that nothing is lost either.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve

from adapters.source import Source, SourceError
from adapters.spark.chunks import Columns, chunk_of, up_to
from adapters.spark.offsets import Offset, Range
from balancer.model import Lease
from stores.protocol import Store, StoreError

log = logging.getLogger("leasehold.spark")

THREADS = 16
SILENT_SECONDS, SILENT_SECONDS_OWNED = 30.0, 5.0
"""Nothing more of a range is expected after so long a silence; sooner where another worker has the lease."""
PAUSE_SECONDS = 0.25


def replayed(offset: Offset, store: Store, source: Source, columns: Columns) -> dict[str, pa.RecordBatch]:
    """The rows of each range that could be read again, by lease key; an empty range has none and is left out."""
    wanted = {key: each for key, each in offset.ranges if not each.empty}
    leases = _leases(wanted, store, source)
    over = Event()

    def rows(key: str) -> pa.RecordBatch | None:
        return _rows(leases[key], wanted[key], source, columns, over)

    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="leasehold-replay") as pool:
            found = dict(zip(wanted, pool.map(rows, wanted), strict=True))
    finally:
        over.set()
    return {key: batch for key, batch in found.items() if batch is not None}


def _leases(wanted: Mapping[str, Range], store: Store, source: Source) -> dict[str, Lease]:
    """What a reader must know of each shard: from its lease, or, where the table is gone, from the listing."""
    try:
        found = {lease.key: lease for lease in store.get(wanted)}
    except StoreError as fault:
        log.warning("the leases could not be read: %s", fault)
        found = {}
    if wanted.keys() - found.keys():
        listed = {shard.id: Lease(shard.id, hash_range=shard.hash_range) for shard in source.shards()}
        found = listed | found
    return {key: found.get(key, Lease(key)) for key in wanted}


def _rows(lease: Lease, wanted: Range, source: Source, columns: Columns, over: Event) -> pa.RecordBatch | None:
    try:
        batches = list(_batches(lease, wanted, source, columns, over))
    except SourceError as fault:
        log.warning("shard %s cannot be read again, it goes on at its lease's checkpoint: %s", lease.key, fault)
        return None
    return pa.concat_batches(batches)


def _batches(lease: Lease, wanted: Range, source: Source, columns: Columns, over: Event) -> Iterator[pa.RecordBatch]:
    """Raises SourceError if the end of the range does not come."""
    # Under the number it was owned by then: whoever reads under a later one is not put out.
    reader = source.open(evolve(lease, epoch=wanted.epoch), wanted.begins)
    patience = SILENT_SECONDS if lease.owner is None else SILENT_SECONDS_OWNED
    silent = 0.0
    try:
        while silent < patience and not over.is_set():
            batch = reader.read()
            chunk = chunk_of(columns, lease, batch)
            if chunk is not None:
                yield up_to(columns, chunk, wanted.ends)
                if chunk.ends.order >= wanted.ends.order:
                    return
            pause = max(PAUSE_SECONDS, batch.wait_seconds)
            silent = 0.0 if chunk is not None or batch.behind_seconds else silent + pause
            over.wait(pause)
    finally:
        reader.close()
    raise SourceError(f"nothing came up to {wanted.ends.sequence} within {patience:g} s")
