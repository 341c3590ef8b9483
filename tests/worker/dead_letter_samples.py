"""Samples for tests: a failed record, a batch that contains it, and its dead letter with a value in every field."""

from attrs import evolve

from leasehold.adapters.consumer.dead_letters.dead_letter import (
    DeadLetterEntry,
)
from leasehold.adapters.consumer.dead_letters.replaying import DeadLetterHolding
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Record

RECORD = Record(b"d", "7", 3, partition_key="k", explicit_hash_key="9", arrived=1.5, token="12")  # noqa: S106  an offset


FULL = DeadLetterEntry("t", "orders", "s-0", "l-0", RECORD, "ValueError", "poison", 5, "w-1", 8)


def batch(stream: str = "orders") -> Delivery:
    """Return a batch of one record, delivered in its third attempt."""
    holding = DeadLetterHolding.of(evolve(FULL, stream=stream))
    return Delivery((RECORD,), RECORD.position, None, holding, None, 3)
