"""Short names for people: of shards, and of numbers of them."""

from collections.abc import Iterable


def short(shard: str) -> str:
    """`shardId-000000000007` as `7`."""
    number = shard.rpartition("-")[2]
    return number.lstrip("0") or "0" if number.isdigit() else shard


def shard_names(shards: Iterable[str]) -> str:
    """`shard 3`, or `shards 2, 3 and 5`."""
    names = [short(shard) for shard in sorted(shards)]
    if len(names) == 1:
        return f"shard {names[0]}"
    return f"shards {', '.join(names[:-1])} and {names[-1]}" if names else "nothing"
