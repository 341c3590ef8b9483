"""A batch and a record that failed, and their dead letter with every field."""

from attrs import evolve

from leasehold.adapters.reading.dead_letters.letter import (
    Letter,
)
from leasehold.adapters.reading.dead_letters.replaying import LetterHolding
from leasehold.adapters.reading.handling import Delivery
from leasehold.adapters.sources.protocol import Record

RECORD = Record(b"d", "7", 3, partition_key="k", explicit_hash_key="9", arrived=1.5, token="12")  # noqa: S106  an offset


FULL = Letter("t", "orders", "s-0", "l-0", RECORD, "ValueError", "poison", 5, "w-1", 8)


def batch(stream: str = "orders") -> Delivery:
    """The one record of a batch, at its third attempt."""
    holding = LetterHolding.of(evolve(FULL, stream=stream))
    return Delivery((RECORD,), RECORD.position, None, holding, None, 3)
