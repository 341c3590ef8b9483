"""Dead letters as a handler leaves them."""

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.sources.protocol import Record


def dead_letter(number: str, sub: int = 0, shard: str = "s-0") -> DeadLetterEntry:
    """Return a dead letter of this record."""
    record = Record(number.encode(), number, sub, partition_key="k")
    return DeadLetterEntry("", "orders", shard, shard, record, "ValueError", "poison", 5, "w-1", 1)
