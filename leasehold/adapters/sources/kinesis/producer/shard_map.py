"""Finds the shard that takes a hash key: the open shards of a stream, found by bisecting their last hash keys."""

from bisect import bisect_left
from collections.abc import Iterable

from attrs import field, frozen

from leasehold.balancer.model import HASH_KEYS, HashRange, Shard


@frozen
class ShardMap:
    """The shards that are written to, in the order of their hash ranges, which leave no hole.

    ids     of the open shards
    lasts   their last hash keys, rising
    ranges  of every listed shard, closed ones too, by id
    """

    ids: tuple[str, ...]
    lasts: tuple[int, ...]
    ranges: dict[str, HashRange] = field(eq=False)

    def shard_of(self, hash_key: int) -> str:
        """The shard that this hash key falls into."""
        return self.ids[bisect_left(self.lasts, hash_key)]


def mapped(shards: Iterable[Shard]) -> ShardMap | None:
    """The map of a complete listing; None if the open shards do not cover the hash key space.

    Such a listing was taken in the middle of a split or a merge, and a later one will do.
    """
    listing = tuple(shards)
    # While a shard is being split it can be listed as open beside its children.
    parents = {parent for shard in listing for parent in shard.parents}
    ranges = {shard.id: shard.hash_range for shard in listing if shard.hash_range is not None}
    leaves = sorted((ranges[shard.id], shard.id) for shard in listing if shard.open and shard.id not in parents)
    firsts = [first for (first, _), _ in leaves]
    lasts = [last for (_, last), _ in leaves]
    if [HASH_KEYS[0], *(last + 1 for last in lasts)] != [*firsts, HASH_KEYS[1] + 1]:
        return None
    return ShardMap(tuple(shard for _, shard in leaves), tuple(lasts), ranges)
