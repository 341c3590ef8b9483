"""Dead letters as files, for tests that replay them."""

from attrs import evolve
from letter_samples import FULL, RECORD

from leasehold.adapters.reading.dead_letters.letter import Letter


def letter(number: int) -> Letter:
    """A letter of this record."""
    return evolve(FULL, record=RECORD._replace(sequence_number=str(number)))
