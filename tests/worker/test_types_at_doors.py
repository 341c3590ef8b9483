"""A call that gets a value of a wrong type rejects it before anything is opened, stored or changed."""

import re
from threading import Event
from typing import Any

import pytest

import leasehold
from leasehold import Lease, Position
from leasehold.adapters.consumer.handling import Delivery, FinalCheckpoint
from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.options import Options, options_by_name
from leasehold.stores import AnnotateLease, CheckpointLease, ClaimLease, CreateLease, ReleaseLease, open_store

ODD_VALUES: list[Any] = [None, b"x", 7, 1.5, float("nan"), 10**400, True, "\ud800", ["x"], {}, object()]
VALID_TYPES: dict[str, Any] = {
    "worker": str,
    "metrics": str,
    "set": dict,
    "lease_seconds": (int, float),
    "slow_seconds": (int, float),
    "handler_seconds": (int, float),
    "checkpoint_seconds": (int, float),
    "linger_seconds": (int, float),
    "drain_seconds": (int, float),
}
"""The valid types of the options that accept some of these values."""
COUNTS = {"attempts", "concurrency", "memory_mib", "max_records", "threads"}
FLAG_OPTIONS = {"create", "late_checkpoints", "wait"}


def strange(name: str) -> list[Any]:
    """Return the values that this option must reject. None is left out, because it stands for the default."""
    valid_types = bool if name in FLAG_OPTIONS else int if name in COUNTS else VALID_TYPES.get(name, ())
    wrong_values = [value for value in ODD_VALUES[1:] if not isinstance(value, valid_types)]
    return wrong_values if name in FLAG_OPTIONS else [*wrong_values, True]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("argument", ["source", "leases"])
def test_source_or_store_of_the_wrong_type_is_rejected_by_name(argument: str, value: Any) -> None:  # noqa: ANN401  anything
    arguments: dict[str, Any] = {
        "source": "kinesis://orders?region=eu-west-1",
        "leases": "memory://types",
        argument: value,
    }
    with pytest.raises(ValueError, match=re.compile(f"{argument}|store", re.IGNORECASE)):
        leasehold.read(arguments["source"], leases=arguments["leases"])


@pytest.mark.parametrize("option", options_by_name(Options))
def test_option_of_the_wrong_type_is_rejected_by_name(option: str) -> None:
    for value in strange(option):
        with pytest.raises((ValueError, TypeError)) as exc_info:
            check_consumption_options("kinesis://orders?region=eu-west-1", "memory://types", print, {option: value})  # type: ignore[misc]
        assert str(exc_info.value), value


@pytest.mark.parametrize(
    "handler",
    [odd_value for odd_value in ODD_VALUES if not isinstance(odd_value, str)],
    ids=lambda odd_value: type(odd_value).__name__,
)
def test_handler_that_cannot_be_called_is_rejected(handler: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises((ValueError, TypeError)):
        check_consumption_options("kinesis://orders?region=eu-west-1", "memory://types", handler, {})


@pytest.mark.parametrize(
    "value", [odd_value for odd_value in ODD_VALUES if not isinstance(odd_value, str)], ids=lambda v: type(v).__name__
)
def test_position_rejects_fields_of_the_wrong_type(value: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises((ValueError, TypeError), match="checkpoint"):
        Position(value)
    with pytest.raises(TypeError, match="checkpoint"):
        Position("7", token=value)
    if not isinstance(value, int):
        with pytest.raises(TypeError, match="checkpoint"):
            Position("7", value)


@pytest.mark.parametrize(
    "value", [odd_value for odd_value in ODD_VALUES if not isinstance(odd_value, str)], ids=lambda v: type(v).__name__
)
def test_write_rejects_fields_of_the_wrong_type(value: Any) -> None:  # noqa: ANN401  anything
    store = open_store(f"memory://types-{id(value)}")
    free_lease = store.write(CreateLease(Lease("s-0"))).lease
    assert free_lease is not None
    listing_before = store.list()
    write_makers: list[Any] = [
        lambda: CreateLease(Lease(value)),
        lambda: CreateLease(value),
        lambda: CreateLease(Lease("s-1", checkpoint=value)),
        lambda: ClaimLease(free_lease, value),
        lambda: ClaimLease(value, "a"),
        lambda: CheckpointLease(free_lease, value),
        lambda: AnnotateLease(free_lease, "name", value),
        lambda: AnnotateLease(free_lease, value, "value"),
        lambda: ReleaseLease(free_lease, value),
    ]
    for make_write in write_makers:
        with pytest.raises(TypeError):
            store.write(make_write())
    assert store.list() == listing_before


def test_write_rejects_strings_that_cannot_be_encoded() -> None:
    """Strings must be encodable because every layout must be able to store what any other layout stores."""
    free_lease = Lease("s-0")
    write_makers: list[Any] = [
        lambda: CreateLease(Lease("\ud800")),
        lambda: ClaimLease(free_lease, "\ud800"),
        lambda: AnnotateLease(free_lease, "name", "\ud800"),
        lambda: AnnotateLease(free_lease, "\ud800", "value"),
    ]
    for make_write in write_makers:
        with pytest.raises(ValueError, match="is not UTF-8"):
            make_write()


class Held:
    """A held lease that records its checkpoints."""

    key, worker, stream, fencing_number = "s-0", "w", "orders", 1
    lease, lost = Lease("s-0"), Event()

    def __init__(self) -> None:
        self.written = list[Position]()

    def checkpoint(self, position: Position) -> bool:
        """Record the checkpoint."""
        self.written.append(position)
        return True


@pytest.mark.parametrize("value", ODD_VALUES[1:], ids=lambda v: type(v).__name__)
def test_checkpoint_of_the_wrong_type_is_rejected(value: Any) -> None:  # noqa: ANN401  anything
    held_lease = Held()
    batch = Delivery([], Position("9"), None, held_lease)
    with pytest.raises(TypeError, match="checkpoint"):
        batch.checkpoint(value)
    with pytest.raises(TypeError, match="checkpoint"):
        FinalCheckpoint(ended=False, holding=held_lease, end=lambda: True).checkpoint(value)
    assert batch.checkpoint()
    assert held_lease.written == [Position("9")]
