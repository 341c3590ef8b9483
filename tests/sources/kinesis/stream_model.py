"""An in-memory stream whose shards can be split and merged, and which can be read as the KCL reads it."""

from collections.abc import Iterator

from attrs import define, evolve, field

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.adapters.sources.kinesis.producer.core import Unit, UnitWritten
from leasehold.balancer.model import HASH_KEYS, Shard


@define
class Stream:
    """Shards, oldest first, and the records written to each of them: (sequence number, data, partition key)."""

    shards: list[Shard] = field(factory=lambda: [Shard("s0", hash_range=HASH_KEYS)])
    logs: dict[str, list[tuple[str, bytes, str]]] = field(factory=dict)
    written: int = 0

    def write(self, unit: Unit) -> UnitWritten:
        """Store a Kinesis record in the shard to which its hash key belongs."""
        [shard] = [
            open_shard.id
            for open_shard in self.open
            if open_shard.hash_range and open_shard.hash_range[0] <= unit.hash_key <= open_shard.hash_range[1]
        ]
        self.written += 1
        self.logs.setdefault(shard, []).append((str(self.written), unit.data, unit.partition_key))
        return UnitWritten(shard, str(self.written))

    @property
    def open(self) -> list[Shard]:
        """Return the open shards in the order of their ranges."""
        return sorted((shard for shard in self.shards if shard.open), key=lambda shard: shard.hash_range or HASH_KEYS)

    def split(self, shard_number: int) -> None:
        parent = self.open[shard_number % len(self.open)]
        first, last = parent.hash_range or HASH_KEYS
        if last - first > 1:
            middle = (first + last) // 2
            self._replace_shards([parent], [(first, middle), (middle + 1, last)])

    def merge(self, shard_number: int) -> None:
        if len(self.open) > 1:
            index = shard_number % (len(self.open) - 1)
            left_shard, right_shard = self.open[index : index + 2]
            self._replace_shards(
                [left_shard, right_shard],
                [((left_shard.hash_range or HASH_KEYS)[0], (right_shard.hash_range or HASH_KEYS)[1])],
            )

    def _replace_shards(self, parents: list[Shard], ranges: list[tuple[int, int]]) -> None:
        names = tuple(parent.id for parent in parents)
        self.shards = [evolve(shard, open=False) if shard.id in names else shard for shard in self.shards]
        self.shards += [
            Shard(f"s{len(self.shards) + i}", parents=names, hash_range=shard) for i, shard in enumerate(ranges)
        ]

    def read(self) -> Iterator[tuple[str, str, int, str, bytes]]:
        """Yield all user records as the KCL reads them, with the records of parents first."""
        for shard in self.shards:
            for sequence, data, key in self.logs.get(shard.id, []):
                for user_record in deaggregate(data, key, None, shard.hash_range, misplaced="drop"):
                    yield (
                        shard.id,
                        sequence,
                        user_record.sub_sequence_number,
                        user_record.partition_key or "",
                        user_record.data,
                    )


def falls(key: str) -> int:
    return hash_partition_key(key)
