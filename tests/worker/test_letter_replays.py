"""What a replay does with each dead letter, depending on what its handler returns or raises."""

import asyncio
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, field
from dead_letter_samples import FULL, RECORD
from replayed_dead_letters import dead_letter

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry, dead_letter_from
from leasehold.adapters.consumer.dead_letters.replaying import DeadLetterHolding, HandlerCaller, ReplayVerdict, replay
from leasehold.adapters.consumer.handling import Delivery, Unhandled
from leasehold.balancer.model import Position


@define
class Folder:
    """A sink with dead letters by name, and a list of the operations on them, in order."""

    there: dict[str, bytes | None] = field(factory=dict)
    did: list[str] = field(factory=list)
    failing: dict[str, Exception] = field(factory=dict)

    def names(self) -> tuple[str, ...]:
        return tuple(self.there)

    def get(self, name: str) -> bytes | None:
        return self.there[name]

    def remove(self, name: str) -> None:
        self.did.append(f"remove {name}")

    def put(self, entry: DeadLetterEntry) -> None:
        raise AssertionError(entry)

    def close(self) -> None:
        """Do nothing, because the folder is in memory."""

    def deliver(self, entry: DeadLetterEntry) -> Exception | None:
        """Record the dead letter, and return the error that the test has set for it."""
        self.did.append(f"deliver {entry.name}")
        return self.failing.get(entry.name)

    def tell(self, name: str, reason: str) -> None:
        self.did.append(f"{name}: {reason}")


def test_dead_letter_is_replayed_in_order_and_removed_once_handled() -> None:
    first_dead_letter, second_dead_letter, third_dead_letter, missing_dead_letter = (
        dead_letter(number) for number in (7, 20, 100, 30)
    )
    stored_lines: dict[str, bytes | None] = {
        entry.name: entry.line for entry in (third_dead_letter, first_dead_letter, second_dead_letter)
    }
    folder = Folder(
        {
            "z.txt": b"",
            **stored_lines,
            missing_dead_letter.name: None,
            "a.txt": b"",
            "1-0-x-y.json": b"{",
            "2-0-x-y.json": b"[",
        }
    )
    folder.failing = {second_dead_letter.name: ValueError("again")}
    assert replay(folder, folder.deliver, folder.tell) == ReplayVerdict(done=2, failed=1, strange=4)
    assert folder.did == [
        "a.txt: its name is not that of a dead letter",
        "z.txt: its name is not that of a dead letter",
        "1-0-x-y.json: it is not a dead letter: it is not JSON",
        "2-0-x-y.json: it is not a dead letter: it is not JSON",
        f"deliver {first_dead_letter.name}",
        f"remove {first_dead_letter.name}",
        f"deliver {second_dead_letter.name}",
        f"{second_dead_letter.name}: ValueError: again",
        f"deliver {third_dead_letter.name}",
        f"remove {third_dead_letter.name}",
    ]


def replay_error(handler: Callable[[Delivery], Any]) -> Exception | None:
    """Return the error that a replay with this handler reports, or None."""
    with HandlerCaller(handler) as handler_calls:
        return handler_calls.deliver(FULL)


def test_replay_handler_gets_a_batch_that_cannot_be_lost() -> None:
    """During a replay, a handler may still checkpoint its batch, and read the attributes of the batch."""
    batches = list[Delivery]()
    assert replay_error(batches.append) is None
    (batch,) = batches
    assert (batch.records, batch.read_to, batch.behind_seconds, batch.attempts) == (
        (RECORD,),
        Position("7", 3, "12"),
        None,
        6,
    )
    assert (batch.lease, batch.shard, batch.stream, batch.worker) == ("l-0", "s-0", "orders", "w-1")
    assert (batch.epoch, batch.lost, batch.checkpoint(RECORD)) == (None, False, True)
    with pytest.raises(ValueError, match="this source has no columns"):
        batch.to_arrow()


def test_replay_handler_result_decides_whether_the_dead_letter_failed() -> None:
    """A handler succeeds only if it returns None. Any other result or exception counts as another failure."""
    error = OSError("disk")

    def raises(fault: BaseException) -> Callable[[Delivery], None]:
        def handle(_batch: Delivery) -> None:
            raise fault

        return handle

    async def return_false(_batch: Delivery) -> object:
        return False

    async def return_none(_batch: Delivery) -> None:
        return None

    assert replay_error(raises(error)) is error
    cancelled_fault = replay_error(raises(CancelledError("x")))
    assert (type(cancelled_fault), str(cancelled_fault)) == (RuntimeError, "CancelledError: x")
    for value_handler in (return_false, lambda _batch: False):
        fault = replay_error(value_handler)
        assert (type(fault), str(fault).partition(":")[0]) == (Unhandled, "it returned a value (bool)")
    assert replay_error(return_none) is None
    with pytest.raises(SystemExit):
        replay_error(raises(SystemExit(3)))


def test_all_dead_letters_of_a_replay_share_one_event_loop() -> None:
    loops = list[asyncio.AbstractEventLoop]()

    async def handle(_batch: Delivery) -> None:
        loops.append(asyncio.get_running_loop())

    with HandlerCaller(handle) as handler_caller:
        assert [handler_caller.deliver(FULL) for _ in range(2)] == [None, None]
        assert loops[0] is loops[1]
        assert not loops[0].is_closed()
    assert loops[0].is_closed()


def test_replayed_dead_letter_names_its_lease_without_an_owner() -> None:
    holding = DeadLetterHolding.of(dead_letter_from(FULL.line))
    assert (holding.key, holding.lease.shard, holding.lease.stream, holding.worker) == ("l-0", "s-0", "orders", "w-1")
    assert holding.checkpoint(Position("7")) is True
