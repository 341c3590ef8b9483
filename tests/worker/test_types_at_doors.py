"""Values of a wrong type are rejected by the call that gets them, before anything is opened, stored or changed."""

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

STRANGE: list[Any] = [None, b"x", 7, 1.5, float("nan"), 10**400, True, "\ud800", ["x"], {}, object()]
FINE: dict[str, Any] = {
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
"""The types of options for which some of the strange values are valid."""
COUNTS = {"attempts", "concurrency", "memory_mib", "max_records", "threads"}
FLAGS = {"create", "late_checkpoints", "wait"}


def strange(name: str) -> list[Any]:
    """Return values that this option can't have. None stands for its default."""
    kinds = bool if name in FLAGS else int if name in COUNTS else FINE.get(name, ())
    values = [value for value in STRANGE[1:] if not isinstance(value, kinds)]
    return values if name in FLAGS else [*values, True]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
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
        with pytest.raises((ValueError, TypeError)) as refused:
            check_consumption_options("kinesis://orders?region=eu-west-1", "memory://types", print, {option: value})  # type: ignore[misc]
        assert str(refused.value), value


@pytest.mark.parametrize(
    "handler", [each for each in STRANGE if not isinstance(each, str)], ids=lambda each: type(each).__name__
)
def test_handler_that_cannot_be_called_is_rejected(handler: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises((ValueError, TypeError)):
        check_consumption_options("kinesis://orders?region=eu-west-1", "memory://types", handler, {})


@pytest.mark.parametrize(
    "value", [each for each in STRANGE if not isinstance(each, str)], ids=lambda v: type(v).__name__
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
    "value", [each for each in STRANGE if not isinstance(each, str)], ids=lambda v: type(v).__name__
)
def test_write_rejects_fields_of_the_wrong_type(value: Any) -> None:  # noqa: ANN401  anything
    store = open_store(f"memory://types-{id(value)}")
    free = store.write(CreateLease(Lease("s-0"))).lease
    assert free is not None
    before = store.list()
    makers: list[Any] = [
        lambda: CreateLease(Lease(value)),
        lambda: CreateLease(value),
        lambda: CreateLease(Lease("s-1", checkpoint=value)),
        lambda: ClaimLease(free, value),
        lambda: ClaimLease(value, "a"),
        lambda: CheckpointLease(free, value),
        lambda: AnnotateLease(free, "name", value),
        lambda: AnnotateLease(free, value, "value"),
        lambda: ReleaseLease(free, value),
    ]
    for make in makers:
        with pytest.raises(TypeError):
            store.write(make())
    assert store.list() == before


def test_write_rejects_strings_that_cannot_be_encoded() -> None:
    """What one layout stores is readable in all others."""
    free = Lease("s-0")
    makers: list[Any] = [
        lambda: CreateLease(Lease("\ud800")),
        lambda: ClaimLease(free, "\ud800"),
        lambda: AnnotateLease(free, "name", "\ud800"),
        lambda: AnnotateLease(free, "\ud800", "value"),
    ]
    for make in makers:
        with pytest.raises(ValueError, match="is not UTF-8"):
            make()


class Held:
    """A lease that notes its checkpoints."""

    key, worker, stream, fence = "s-0", "w", "orders", 1
    lease, lost = Lease("s-0"), Event()

    def __init__(self) -> None:
        self.written = list[Position]()

    def checkpoint(self, position: Position) -> bool:
        """Note it."""
        self.written.append(position)
        return True


@pytest.mark.parametrize("value", STRANGE[1:], ids=lambda v: type(v).__name__)
def test_checkpoint_of_the_wrong_type_is_rejected(value: Any) -> None:  # noqa: ANN401  anything
    held = Held()
    batch = Delivery([], Position("9"), None, held)
    with pytest.raises(TypeError, match="checkpoint"):
        batch.checkpoint(value)
    with pytest.raises(TypeError, match="checkpoint"):
        FinalCheckpoint(ended=False, holding=held, end=lambda: True).checkpoint(value)
    assert batch.checkpoint()
    assert held.written == [Position("9")]
