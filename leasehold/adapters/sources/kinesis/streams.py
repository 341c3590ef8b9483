"""Several Kinesis streams as one source, in KCL's multi-stream form: one table, one worker, many streams.

A lease's key is `account:stream:creationEpoch:shardId`, and its stream is all but the last of these: a stream
that was deleted and created again is another stream.
"""

import logging
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from attrs import evolve

from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.kinesis.source import open_url as open_one
from leasehold.adapters.sources.protocol import Batch, Reader, Settled, Source
from leasehold.balancer.model import Lease, Position, Shard
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # imported where it is needed
    from boto3 import Session

log = escaped(logging.getLogger("leasehold.kinesis"))


class KinesisStreams:
    """The streams of these sources; more may come, and some go, while a worker reads.

    A worker looks at what has changed at its next listing of shards, which `Worker.hurry` brings forward. Leases of
    other streams in the table are nothing to it. All workers of a fleet should soon be told the same.
    """

    def __init__(self, sources: Iterable[KinesisSource]) -> None:
        self._sources: dict[str, KinesisSource] = {}
        self._unnamed = list(sources)
        self._lock = Lock()
        self.unlisted: SourceUnavailable | None = None
        """Why a stream is missing from the last listing, where that may pass."""

    @property
    def stream(self) -> str:
        """Empty: each lease carries the name of its own stream."""
        return ""

    def add(self, source: KinesisSource) -> None:
        """Read this stream too."""
        with self._lock:
            self._unnamed.append(source)

    def remove(self, name: str) -> None:
        """Read the stream of this name no longer; its leases are released, and stay in the table."""
        with self._lock:
            self._unnamed = [source for source in self._unnamed if source.name != name]
            self._sources = {key: source for key, source in self._sources.items() if source.name != name}

    def reads(self, lease: Lease) -> bool:
        """Whether this lease is of one of these streams."""
        self._learn_names()
        return lease.stream in self._sources

    def arn(self, stream: str) -> str:
        """Return the ARN of one of these streams."""
        return self._source(stream).arn(stream)

    def shards(self) -> tuple[Shard, ...]:
        """The shards of each stream that answers; raises what the first one raised if none does.

        A stream that never answered, and cannot be used as asked, raises SourceError: its name is probably wrong.
        """
        unnamed = self._learn_names()
        # A stream that was created again is another stream: its shards have the ids of the former ones.
        for former, source in tuple(self._sources.items()):
            try:
                present = source.incarnation() or former
            except SourceError:
                continue  # its listing says what is wrong
            if present != former:
                begin = "whose leases begin at the initial position; those of %s are read no longer"
                text = f"stream %s was made anew: %s is another stream, {begin}"
                log.warning(text, source.name, present, former)
                with self._lock:
                    renamed = {present if key == former else key: each for key, each in self._sources.items()}
                    self._sources = renamed
        lasting = [fault for fault in unnamed if not isinstance(fault, SourceUnavailable)]
        if lasting:
            raise lasting[0]
        faults, listed = unnamed, []
        for stream, source in tuple(self._sources.items()):
            try:
                listed += [_qualified(stream, shard) for shard in source.shards()]
            except SourceError as fault:
                faults.append(fault)
        if faults and not listed:
            raise faults[0]
        self.unlisted = next((fault for fault in faults if isinstance(fault, SourceUnavailable)), None)
        for missing in faults:
            if not isinstance(missing, SourceUnavailable):
                log.warning("the shards of one stream could not be listed: %s", missing)
        return tuple(listed)

    def gone(self, shard: str) -> bool:
        """Whether its stream answers and says that this shard, by its lease's key, does not exist."""
        stream, _, plain = shard.rpartition(":")
        return self._source(stream).gone(plain)

    def latest(self, lease: Lease) -> Position:
        """The position that LATEST means on this shard now."""
        return self._source(lease.stream).latest(lease)

    def settled(self, lease: Lease, until: float) -> Settled | None:
        """The answer of the lease's own stream."""
        return self._source(lease.stream).settled(lease, until)

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader of its stream's shard."""
        return _StreamReader(self, lease.stream, self._source(lease.stream).open(lease, start))

    def close(self) -> None:
        """Close all connections."""
        for source in (*self._sources.values(), *self._unnamed):
            source.close()

    def _source(self, stream: str) -> KinesisSource:
        if stream not in self._sources:
            raise SourceError(f"stream {stream!r} is not read here")
        return self._sources[stream]

    def _learn_names(self) -> list[SourceError]:
        """Ask the streams not yet named what they are; what those that did not answer raised."""
        with self._lock:
            faults: list[SourceError] = []
            for source in tuple(self._unnamed):
                try:
                    self._sources = {**self._sources, source.identity(): source}
                    self._unnamed.remove(source)
                except SourceError as fault:
                    faults.append(fault)
            return faults


class _StreamReader:
    """A reader whose children are named as leases are."""

    def __init__(self, streams: KinesisStreams, stream: str, reader: Reader) -> None:
        self._streams, self._stream, self._reader = streams, stream, reader

    def read(self) -> Batch:
        """Read once. Raises SourceError once the stream is no longer read here."""
        if not self._streams.reads(Lease("", stream=self._stream)):
            raise SourceError(f"stream {self._stream!r} is no longer read here")
        batch = self._reader.read()
        return evolve(batch, children=tuple(_qualified(self._stream, child) for child in batch.children))

    def close(self) -> None:
        """Close all connections."""
        self._reader.close()


def _qualified(stream: str, shard: Shard) -> Shard:
    parents = tuple(f"{stream}:{parent}" for parent in shard.parents)
    return evolve(shard, id=f"{stream}:{shard.id}", stream=stream, parents=parents)


def open_url(name: str, options: Mapping[str, str], *, session: "Session | None" = None) -> Source:
    """The stream of this name; several, with commas in between, as one source. Raises SourceError, ValueError."""
    names = name.split(",")
    if len(names) == 1:
        return open_one(name, options, session=session)
    if "" in names or len(set(names)) < len(names):
        raise ValueError("source URL: several streams want different names with commas in between: kinesis://a,b")
    if options.get("consumer", "").startswith("arn:"):
        raise ValueError("source URL: option 'consumer' wants a name for several streams: an ARN is one stream's alone")
    return KinesisStreams(open_one(each, options, session=session) for each in names)
