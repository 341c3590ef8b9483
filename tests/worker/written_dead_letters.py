"""Makes dead letters like those that are written when a handler fails."""

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.sources.protocol import Record


def dead_letter(sequence_number: str, sub_sequence_number: int = 0, shard: str = "s-0") -> DeadLetterEntry:
    """Return a dead letter for a record with this sequence number."""
    record = Record(sequence_number.encode(), sequence_number, sub_sequence_number, partition_key="k")
    return DeadLetterEntry("", "orders", shard, shard, record, "ValueError", "poison", 5, "w-1", 1)
