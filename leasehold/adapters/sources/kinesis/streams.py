"""A source of several Kinesis streams, with one worker and one lease table, like the KCL's multi-stream mode.

A lease key is `account:stream:creationEpoch:shardId`. The lease's stream is the key without the shard id, so a stream
that was deleted and recreated counts as another stream.
"""

import logging
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from attrs import evolve

from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.kinesis.source import open_url as open_one
from leasehold.adapters.sources.protocol import Batch, Reader, SettledShard, Source
from leasehold.balancer.model import Lease, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.printable import make_safe_logger

if TYPE_CHECKING:  # boto3 is slow to import
    from boto3 import Session

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))


class KinesisStreams:
    """Reads the streams of several sources. Streams can be added and removed while a worker is running.

    A worker notices a change when it next lists the shards. To make that happen sooner, call `Worker.hurry`. Make each
    change in all workers of a fleet at about the same time, because a worker ignores the leases of streams that it does
    not have.
    """

    def __init__(self, sources: Iterable[KinesisSource]) -> None:
        self._sources: dict[str, KinesisSource] = {}
        self._unresolved_sources = list(sources)
        self._lock = Lock()
        self.unlisted_stream_error: SourceUnavailable | None = None
        """The error of a stream that is missing from the last listing, if that error may be temporary."""

    @property
    def stream(self) -> str:
        """Always "", because each lease contains the name of its own stream."""
        return ""

    def add(self, source: KinesisSource) -> None:
        """Start reading this stream."""
        with self._lock:
            self._unresolved_sources.append(source)

    def remove(self, name: str) -> None:
        """Stop reading the stream of this name. Its leases are released, but stay in the table."""
        with self._lock:
            self._unresolved_sources = [source for source in self._unresolved_sources if source.name != name]
            self._sources = {key: source for key, source in self._sources.items() if source.name != name}

    def reads(self, lease: Lease) -> bool:
        self._resolve_identities()
        return lease.stream in self._sources

    def arn(self, stream: str) -> str:
        return self._find_source(stream).arn(stream)

    def shards(self) -> tuple[Shard, ...]:
        """List the shards of each stream that responds.

        Raises:
            SourceError: If no stream responds, this is the error of the first one. If a stream has never responded, its
                permanent error is also raised, because its name is probably wrong.
        """
        resolve_faults = self._resolve_identities()
        # A recreated stream counts as another stream, although its shard ids are the same as before.
        for previous_identity, source in tuple(self._sources.items()):
            try:
                incarnation = source.incarnation() or previous_identity
            except SourceError:
                continue  # the listing below raises the error again
            if incarnation != previous_identity:
                consequence = "whose leases start at the initial position; %s is no longer read"
                message = f"stream %s was recreated: %s is another stream, {consequence}"
                log.warning(message, source.name, incarnation, previous_identity)
                with self._lock:
                    sources = {
                        incarnation if key == previous_identity else key: value for key, value in self._sources.items()
                    }
                    self._sources = sources
        permanent_faults = [fault for fault in resolve_faults if not isinstance(fault, SourceUnavailable)]
        if permanent_faults:
            raise permanent_faults[0]
        faults, shards = resolve_faults, []
        for stream, source in tuple(self._sources.items()):
            try:
                shards += [_with_stream_name(stream, shard) for shard in source.shards()]
            except SourceError as fault:
                faults.append(fault)
        if faults and not shards:
            raise faults[0]
        self.unlisted_stream_error = next((fault for fault in faults if isinstance(fault, SourceUnavailable)), None)
        for listing_fault in faults:
            if not isinstance(listing_fault, SourceUnavailable):
                log.warning("the shards of one stream could not be listed: %s", listing_fault)
        return tuple(shards)

    def gone(self, shard: str) -> bool:
        stream, _, shard_id = shard.rpartition(":")
        return self._find_source(stream).gone(shard_id)

    def latest(self, lease: Lease) -> Position:
        return self._find_source(lease.stream).latest(lease)

    def settled(self, lease: Lease, until: float) -> SettledShard | None:
        return self._find_source(lease.stream).settled(lease, until)

    def open(self, lease: Lease, start: Position) -> Reader:
        return _StreamReader(self, lease.stream, self._find_source(lease.stream).open(lease, start))

    def close(self) -> None:
        """Close all connections."""
        for source in (*self._sources.values(), *self._unresolved_sources):
            source.close()

    def _find_source(self, stream: str) -> KinesisSource:
        if stream not in self._sources:
            raise SourceError(f"stream {stream!r} is not one of the streams of this source")
        return self._sources[stream]

    def _resolve_identities(self) -> list[SourceError]:
        """Resolve the streams without an identity, and return the errors of those that did not respond."""
        with self._lock:
            faults: list[SourceError] = []
            for source in tuple(self._unresolved_sources):
                try:
                    self._sources = {**self._sources, source.identity(): source}
                    self._unresolved_sources.remove(source)
                except SourceError as fault:
                    faults.append(fault)
            return faults


class _StreamReader:
    """Adds the stream's name to the ids of child shards in batches, so that they have the form of lease keys."""

    def __init__(self, streams: KinesisStreams, stream: str, reader: Reader) -> None:
        self._streams, self._stream, self._reader = streams, stream, reader

    def read(self) -> Batch:
        """Read once. Raises SourceError after the stream was removed."""
        if not self._streams.reads(Lease("", stream=self._stream)):
            raise SourceError(f"stream {self._stream!r} was removed from this source")
        batch = self._reader.read()
        return evolve(batch, children=tuple(_with_stream_name(self._stream, child) for child in batch.children))

    def close(self) -> None:
        """Close all connections."""
        self._reader.close()


def _with_stream_name(stream: str, shard: Shard) -> Shard:
    parents = tuple(f"{stream}:{parent}" for parent in shard.parents)
    return evolve(shard, id=f"{stream}:{shard.id}", stream=stream, parents=parents)


def open_url(name: str, options: Mapping[str, str], *, session: "Session | None" = None) -> Source:
    """Open the stream of this name. If there are several names, separated by commas, open their streams as one source.

    Raises:
        SourceError: If no region is known.
        ValueError: If a name or an option is wrong.
    """
    stream_names = name.split(",")
    if len(stream_names) == 1:
        return open_one(name, options, session=session)
    if "" in stream_names or len(set(stream_names)) < len(stream_names):
        raise ValueError(
            "source URL: the names of several streams must differ and be separated by commas: kinesis://a,b"
        )
    if options.get("consumer", "").startswith("arn:"):
        raise ValueError(
            "source URL: option 'consumer' must be a name for several streams, because an ARN belongs to one stream"
        )
    return KinesisStreams(open_one(stream_name, options, session=session) for stream_name in stream_names)
