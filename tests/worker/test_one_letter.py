"""One dead letter: its fields, which of them may be missing, and which values are rejected."""

import base64
import json

import pytest
from attrs import evolve
from dead_letter_samples import FULL, batch

from leasehold.adapters.consumer.dead_letters.dead_letter import (
    INTEGER_LIMIT,
    MAX_ERROR_TEXT,
    BadDeadLetter,
    DeadLetterEntry,
    dead_letter_for,
    dead_letter_from,
    sort_key_of,
    with_failed_attempt,
)
from leasehold.adapters.consumer.handling import Unhandled, as_exception
from leasehold.adapters.sources.protocol import Record


def encoded(**fields: object) -> bytes:
    """Return a dead letter as another program may write it, with the required fields and these."""
    required_fields = {"shard": "s", "lease": "l", "sequence_number": "7", "data": base64.b64encode(b"d").decode()}
    return json.dumps(required_fields | fields).encode()


def test_dead_letter_needs_only_the_required_fields() -> None:
    assert dead_letter_from(encoded()) == DeadLetterEntry("", "", "s", "l", Record(b"d", "7"), "", "", 0, "", 0)


@pytest.mark.parametrize("field", ["shard", "lease", "sequence_number", "data"])
def test_missing_field_of_a_dead_letter_is_named(field: str) -> None:
    fields = json.loads(encoded())
    del fields[field]
    with pytest.raises(BadDeadLetter, match=rf"^{field}: it is missing$"):
        dead_letter_from(json.dumps(fields).encode())


@pytest.mark.parametrize("line", [b"{", b"", b"\xff", b"[" * 100_000])
def test_string_that_is_not_json_is_no_dead_letter(line: bytes) -> None:
    with pytest.raises(BadDeadLetter, match=r"^it is not JSON$"):
        dead_letter_from(line)


@pytest.mark.parametrize("line", [b"[]", b"7", b"null"])
def test_json_that_is_not_an_object_is_no_dead_letter(line: bytes) -> None:
    with pytest.raises(BadDeadLetter, match=r"^it is no object$"):
        dead_letter_from(line)


NOT_A_STRING, NOT_WHOLE = "it must be a string", "it must be a whole number"
DECIMAL_MESSAGE = "it must be a decimal number, as a string"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, 3, NOT_A_STRING) for name in ("shard", "lease", "data", "sequence_number", "partition_key", "offset")),
        *((name, True, NOT_A_STRING) for name in ("table", "stream", "error", "text", "worker", "explicit_hash_key")),
        *((name, "1", NOT_WHOLE) for name in ("attempts", "time_ms", "sub_sequence_number", "arrived_ms")),
        *((name, True, NOT_WHOLE) for name in ("attempts", "time_ms", "sub_sequence_number", "arrived_ms")),
        ("attempts", 1.0, NOT_WHOLE),
        ("alone", "1", NOT_WHOLE),
        ("attempts", -1, f"{NOT_WHOLE} from 0 to {INTEGER_LIMIT - 1}"),
        ("attempts", INTEGER_LIMIT, f"{NOT_WHOLE} from 0 to {INTEGER_LIMIT - 1}"),
        ("sequence_number", "", DECIMAL_MESSAGE),
        ("sequence_number", "1a", DECIMAL_MESSAGE),
        ("sequence_number", "\u0663", DECIMAL_MESSAGE),
        ("data", "%", "it is not base64"),
        ("data", "ZA==%", "it is not base64"),
    ],
)
def test_field_of_the_wrong_type_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(BadDeadLetter) as exc_info:
        dead_letter_from(encoded(**{field: value}))
    assert str(exc_info.value) == f"{field}: {message}"


@pytest.mark.parametrize("number", [0, INTEGER_LIMIT - 1])
def test_integers_are_accepted_up_to_the_bound(number: int) -> None:
    assert dead_letter_from(encoded(attempts=number)).attempts == number


def test_dead_letters_are_sorted_by_record_position() -> None:
    """Sorting by position keeps the records of one partition key in order."""
    assert sort_key_of(FULL.name) == (7, 3, FULL.name)
    assert sort_key_of("notes.txt") is None
    assert sort_key_of(f"x{FULL.name}") is None


def test_dead_letter_contains_its_records_origin_and_error() -> None:
    entry = dead_letter_for(batch(), ValueError("poison"), stream="other", table="t", now=9.0084)
    assert entry == evolve(FULL, attempts=3, time_ms=9008)
    assert dead_letter_for(batch(""), ValueError("poison"), stream="other", table="t", now=0.0084).stream == "other"


def test_dead_letter_contains_the_raised_error_without_its_cause() -> None:
    """The dead letter contains the exception that the handler raised, rather than our wrapper or its cause."""
    error = ValueError("mine")
    error.__cause__ = OSError("disk")

    def error_of(fault: Exception) -> tuple[str, str]:
        entry = dead_letter_for(batch(), fault, stream="", table="", now=0.0)
        return entry.error, entry.text

    assert error_of(error) == ("ValueError", "mine")
    assert error_of(as_exception(GeneratorExit("odd"))) == ("GeneratorExit", "odd")
    assert error_of(Unhandled("it returned a value")) == ("Unhandled", "it returned a value")
    assert error_of(ValueError("x" * 2 * MAX_ERROR_TEXT)) == ("ValueError", "x" * MAX_ERROR_TEXT)


def test_dead_letter_that_failed_again_describes_the_latest_attempt() -> None:
    failed_again = with_failed_attempt(FULL, OSError("y" * 2 * MAX_ERROR_TEXT), worker="r-1", now=9.0124)
    assert failed_again == evolve(FULL, alone=1, error="OSError", text="y" * MAX_ERROR_TEXT, worker="r-1", time_ms=9012)


def test_name_of_a_dead_letter_is_short_enough_for_a_file() -> None:
    """The source defines the ids of shards, which may be long. The last part of the id stays in the name."""
    entry = evolve(FULL, shard=f"{'x' * 300}-0007")
    assert len(entry.name) < 255
    assert "-0007-" in entry.name
    assert sort_key_of(entry.name) == (7, 3, entry.name)
