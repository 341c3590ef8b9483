"""A source that passes every call on to another: what a wrapper of a source begins with."""

from leasehold.adapters.sources.protocol import Identified, Reader, Selective, Source
from leasehold.balancer.model import Lease, Position, Shard


class PassingSource:
    """Answers as the source that it stands before; a subclass says what it does otherwise."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def stream(self) -> str:
        """The name that leases carry."""
        return self._source.stream

    def reads(self, lease: Lease) -> bool:
        """Whether this lease is of a stream it reads. Raises SourceError for one that its table must not hold."""
        return self._source.reads(lease) if isinstance(self._source, Selective) else True

    def incarnation(self) -> str:
        """Which of the streams of this name it is, or ""."""
        return self._source.incarnation() if isinstance(self._source, Identified) else ""

    def shards(self) -> tuple[Shard, ...]:
        """The complete listing."""
        return self._source.shards()

    def gone(self, shard: str) -> bool:
        """Whether the stream answers and has no such shard."""
        return self._source.gone(shard)

    def latest(self, lease: Lease) -> Position:
        """The position that LATEST means now."""
        return self._source.latest(lease)

    def open(self, lease: Lease, start: Position) -> Reader:
        """A reader that starts just after `start`."""
        return self._source.open(lease, start)

    def close(self) -> None:
        """Close all connections."""
        self._source.close()
