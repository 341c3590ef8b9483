"""Makes dead letters for tests that replay them."""

from attrs import evolve
from dead_letter_samples import FULL, RECORD

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry


def dead_letter(number: int) -> DeadLetterEntry:
    """Return a dead letter for a record with this sequence number."""
    return evolve(FULL, record=RECORD._replace(sequence_number=str(number)))
