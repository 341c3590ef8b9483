"""Tests which leases a copy or a reset writes, and what happens if the store changes in the meantime."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest
from attrs import define, evolve

from leasehold.adapters.consumer.lifecycle import ReadingStart
from leasehold.adapters.ops import checkpoints as checkpoint_moves
from leasehold.adapters.ops.checkpoints import Move, live_keys, without_owner
from leasehold.adapters.worker.annotations import LATEST_MS, Identity
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import OutcomeUnknown
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Outcome
from leasehold.stores.writes import (
    CheckpointLease,
    ClaimLease,
    CreateLease,
    ReleaseLease,
    RenewLease,
    ResetLease,
    Write,
)
from leasehold_lab.contract.actors import (
    clear_layout_fields,
    create_lease_with_owner,
    create_owned_lease,
    create_unowned_lease,
    expect_applied,
)

if TYPE_CHECKING:
    from leasehold.adapters.sources.protocol import Source
    from leasehold.stores.protocol import Store

AT_9, AT_10 = Position("9", 0, "4520"), Position("10", 0, "4530")


def leases(*checkpoints: Position, owner: str | None = None) -> tuple[Lease, ...]:
    """Return leases "0", "1", … with these checkpoints."""
    return tuple(Lease(str(n), checkpoint=position, owner=owner) for n, position in enumerate(checkpoints))


def decisions_and_reasons(moves: tuple[Move, ...]) -> list[tuple[str, str]]:
    """Return the decision for each lease, and the reason for it."""
    return [(move.do, move.why) for move in moves]


def test_copying_only_moves_checkpoints_forward() -> None:
    source_leases = leases(AT_9, AT_9, AT_10, SHARD_END, LATEST, AT_9, AT_9)
    target_leases = leases(TRIM_HORIZON, AT_9, AT_9, AT_9, TRIM_HORIZON, AT_10, owner="ann")
    assert decisions_and_reasons(checkpoint_moves.plan_copies(source_leases, target_leases, {"2"})) == [
        ("forward", ""),
        ("same", ""),
        ("refuse", "ann is working on it"),
        ("forward", ""),
        ("refuse", "another start is stored there"),
        ("refuse", "a later checkpoint is stored there"),
        ("create", ""),
    ]


def test_copying_never_moves_a_checkpoint_back_within_a_record() -> None:
    """The user records of one aggregated record count, even if the fencing number must be raised."""
    source_lease, target_lease = (
        Lease("0", checkpoint=Position("9", 1), epoch=7),
        Lease("0", checkpoint=Position("9", 3), epoch=2),
    )
    planned_moves = checkpoint_moves.plan_copies((source_lease,), (target_lease,), ())
    assert decisions_and_reasons(planned_moves) == [("refuse", "a later checkpoint is stored there")]


def test_a_copied_lease_is_complete_and_unowned() -> None:
    """A new fleet does not have to wait until the old leases expire, and reads no child shard before its parents."""
    lease = Lease(
        "orders:s-1",
        stream="orders",
        shard="s-1",
        parents=("orders:s-0",),
        owner="ann",
        checkpoint=LATEST,
        hash_range=(0, 9),
        weight=2048,
        next_owner="bob",
        yields=True,
        epoch=7,
        annotations=(("bulletin", "x"), ("latest_ms", "5")),
    )
    expected = evolve(lease, owner=None, next_owner=None, yields=False, annotations=(("latest_ms", "5"),))
    assert without_owner(lease, LATEST) == expected
    assert without_owner(lease, AT_9) == evolve(expected, checkpoint=AT_9, annotations=())


def test_prefixes_are_removed_and_added_in_keys_and_parents() -> None:
    """If a lease named a parent that is missing in its table, its shard would be read before that parent."""
    prefixed_lease = Lease("orders:s-1", stream="orders", shard="s-1", parents=("orders:s-0",))
    other_lease = Lease("bills:s-1")
    plain_lease = Lease("s-1", parents=("s-0",))
    assert checkpoint_moves.rename_prefix((prefixed_lease, other_lease), "orders:", "") == (plain_lease,)
    assert checkpoint_moves.rename_prefix((plain_lease,), "", "orders:") == (prefixed_lease,)


def test_a_hubs_leases_are_copied_to_another_group_only_on_request() -> None:
    """A new group can begin where an old one stopped, but never by mistake."""
    lease = Lease("3", stream="ns/orders/old")
    assert checkpoint_moves.rename_prefix((lease,), "", "") == (lease,)
    assert checkpoint_moves.rename_prefix((lease,), "", "", "ns/orders/new") == (evolve(lease, stream="ns/orders/new"),)


def test_a_written_checkpoint_is_read_back() -> None:
    """A store that confirms a write without keeping it is noticed before a record is lost."""
    target = MemoryStore()
    moves = checkpoint_moves.plan_copies(leases(AT_9, AT_9), (), ())
    checkpoint_moves.copy_lease(target, moves[0])
    assert decisions_and_reasons(checkpoint_moves.verify(target, moves)) == [
        ("create", ""),
        ("refuse", "it was written, but is missing now"),
    ]


def test_a_lease_created_during_the_copy_is_not_overwritten() -> None:
    target = MemoryStore()
    (move,) = checkpoint_moves.plan_copies(leases(AT_9), (), ())
    expect_applied(target.write(CreateLease(Lease("0"))))
    assert checkpoint_moves.copy_lease(target, move) == move.refused("another process changed it in the meantime")


def test_an_owner_is_alive_if_it_renews_while_we_watch() -> None:
    """Leases that still name a dead owner do not block the copy, and a live owner keeps its leases."""
    store = MemoryStore()
    rows = [create_owned_lease(store, key=key) for key in ("alive", "dead", "let-go")] + [
        create_unowned_lease(store, key="free")
    ]
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        expect_applied(store.write(RenewLease(rows[0])))
        expect_applied(store.write(ReleaseLease(rows[2], "ann")))

    assert live_keys(store, rows, 40.0, pause) == {"alive"}
    assert waits == [40.0]


def test_old_and_unowned_leases_are_not_watched() -> None:
    """A reset of a stopped fleet does not watch the leases for almost a minute."""
    unchanged_leases = (
        Lease("old", owner="ann", idle=41.0),
        Lease("free"),
        Lease("done", owner="ann", checkpoint=SHARD_END),
    )
    waits: list[float] = []
    assert live_keys(MemoryStore(), unchanged_leases, 40.0, waits.append) == frozenset()
    assert waits == []


def test_a_reset_can_move_either_way() -> None:
    """A checkpoint that moves back is written in another way than one that moves forward."""
    stored_leases = leases(TRIM_HORIZON, AT_9, AT_10, SHARD_END, LATEST, owner="ann")
    assert decisions_and_reasons(checkpoint_moves.plan_resets(stored_leases, AT_10, {"4"})) == [
        ("forward", ""),
        ("forward", ""),
        ("same", ""),
        ("back", ""),
        ("refuse", "ann is working on it"),
    ]


@pytest.mark.parametrize("position", [TRIM_HORIZON, LATEST, at_timestamp(5), Position("7", 2), Position("12")])
def test_a_reset_sets_any_position(position: Position) -> None:
    """Neither a later checkpoint nor the end of the shard prevents the reset."""
    for old_checkpoint in (TRIM_HORIZON, LATEST, Position("9"), SHARD_END):
        store = MemoryStore()
        stored_lease = create_unowned_lease(store, "0", old_checkpoint)
        (move,) = checkpoint_moves.plan_resets((stored_lease,), position, ())
        assert checkpoint_moves.reset(store, move) == move
        assert clear_layout_fields(store.get(["0"])[0]) == Lease("0", checkpoint=position)


def test_a_reset_spares_an_owner_that_renews_unless_forced() -> None:
    store = MemoryStore()
    listed_lease = create_owned_lease(store, key="0", checkpoint=AT_9)
    (move,) = checkpoint_moves.plan_resets((listed_lease,), TRIM_HORIZON, ())
    expect_applied(store.write(RenewLease(listed_lease)))
    assert checkpoint_moves.reset(store, move).why == "another process changed it in the meantime"
    assert store.get(["0"])[0].owner == "ann"
    assert checkpoint_moves.reset(store, move, insist=True) == move
    assert clear_layout_fields(store.get(["0"])[0]) == Lease("0")


def test_a_forced_copy_keeps_a_later_checkpoint_of_the_owner() -> None:
    """If the owner renews, the copy starts over, but the owner may also have moved its checkpoint forward."""
    store = MemoryStore()
    listed_lease = create_owned_lease(store, key="0", checkpoint=AT_9)
    copied_lease = evolve(Lease("0", checkpoint=AT_9), epoch=listed_lease.epoch + 5)
    (move,) = checkpoint_moves.plan_copies((copied_lease,), (listed_lease,), ())
    current_lease = expect_applied(store.write(CheckpointLease(listed_lease, AT_10)))
    assert checkpoint_moves.copy_lease(store, move, insist=True).why == "another process changed it in the meantime"
    assert store.get(["0"])[0] == current_lease


class Killed(BaseException):
    """Raised at the point at which the simulated process is killed."""


@define
class StoreThatDies:
    """A store whose process dies just before, or just after, one of its writes."""

    store: MemoryStore
    writes: int
    after: bool

    def __getattr__(self, name: str) -> object:
        """Wrap the store's methods; everything except reads counts as a write."""
        attribute = getattr(self.store, name)
        return attribute if name in {"get", "list", "capabilities"} else partial(self._write, attribute)

    def _write(self, write: Callable[..., Outcome], *arguments: object, **named: object) -> Outcome:
        self.writes -= 1
        if self.writes == 0 and not self.after:
            raise Killed
        outcome = write(*arguments, **named)
        if self.writes == 0:
            raise Killed
        return outcome


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("owner", [None, "ann"])
def test_a_killed_reset_keeps_every_lease_and_can_be_repeated(owner: str | None, *, after: bool) -> None:
    """No lease is ever missing. The fleet would create a missing lease again, perhaps at LATEST, and skip records."""
    for writes in count(1):
        store = MemoryStore()
        rows = [
            create_lease_with_owner(store, Lease(key, owner=owner, checkpoint=AT_9, hash_range=(0, 9))) for key in "ab"
        ]
        moves = checkpoint_moves.plan_resets(rows, TRIM_HORIZON, ())
        dying_store = StoreThatDies(store, writes, after)
        try:
            for move in moves:
                checkpoint_moves.reset(cast("Store", dying_store), move)
        except Killed:
            assert {(lease.key, lease.hash_range) for lease in store.list().leases} == {("a", (0, 9)), ("b", (0, 9))}
        else:
            break
        for move in checkpoint_moves.plan_resets(store.list().leases, TRIM_HORIZON, ()):
            assert checkpoint_moves.reset(store, move) == move
        assert [clear_layout_fields(lease) for lease in store.list().leases] == [
            Lease(key, checkpoint=TRIM_HORIZON, hash_range=(0, 9)) for key in "ab"
        ]
    assert writes > len(rows)


def test_a_second_reset_to_latest_pins_the_lease_again() -> None:
    """The lease begins at the tip as of this reset, not at the tip as of the fleet's first start days ago."""
    store = MemoryStore()
    stored_lease = expect_applied(
        store.write(CreateLease(Lease("0", checkpoint=AT_9, annotations=((LATEST_MS, "5"), ("other", "x")))))
    )
    (move,) = checkpoint_moves.plan_resets((stored_lease,), LATEST, ())
    checkpoint_moves.reset(store, move)
    row = expect_applied(store.write(ClaimLease(store.get(["0"])[0], "ann")))
    assert row.annotation("other") == "x"
    holding = Holding(store, row, identity=Identity("ann", "p"), clock=lambda: 0.0, write_began=0.0, lease_seconds=10.0)
    assert ReadingStart(holding, cast("Source", SourceAtNoon()), Config()).find({}) == NOON
    assert store.get(["0"])[0].annotation(LATEST_MS) == str(NOON.sub)


NOON = at_timestamp(1_700_000_000_000)


class SourceAtNoon:
    """A source whose latest position is always `NOON`."""

    def latest(self, _lease: Lease) -> Position:
        return NOON


def test_a_copied_lease_continues_its_fencing_number() -> None:
    """Systems that remember the fencing numbers of the old fleet do not reject those from the new store."""
    source, target = MemoryStore(), MemoryStore()
    source_lease = expect_applied(source.write(CreateLease(Lease("0", checkpoint=AT_9, epoch=502))))
    tokens = [source_lease.epoch]
    for position in (AT_9, AT_9, AT_10):
        source_lease = expect_applied(
            source.write(CheckpointLease(expect_applied(source.write(ClaimLease(source_lease, "ann"))), position))
        )
        tokens.append(source_lease.epoch)
        source_lease = expect_applied(source.write(ReleaseLease(source_lease, "ann")))
        (move,) = checkpoint_moves.plan_copies((source_lease,), target.list().leases, ())
        assert checkpoint_moves.verify(target, [checkpoint_moves.copy_lease(target, move)]) == (move,)
        (target_lease,) = target.list().leases
        assert target_lease.checkpoint == position
        claimed_lease = expect_applied(target.write(ClaimLease(target_lease, "bob")))
        tokens.append(claimed_lease.epoch)
        expect_applied(target.write(ReleaseLease(claimed_lease, "bob")))
        source_lease = expect_applied(source.write(ResetLease(source_lease, position, epoch=claimed_lease.epoch + 10)))
    assert tokens == sorted(set(tokens))


def test_a_second_copy_raises_an_outdated_fencing_number() -> None:
    """If the fleet continued after the first copy, the second copy must also raise the number in the target."""
    source_leases = (Lease("0", checkpoint=AT_9, epoch=7), Lease("1", checkpoint=SHARD_END, epoch=7))
    target_leases = (Lease("0", checkpoint=AT_9, epoch=6), Lease("1", checkpoint=SHARD_END, epoch=6))
    assert decisions_and_reasons(checkpoint_moves.plan_copies(source_leases, target_leases, ())) == [
        ("raise", ""),
        ("same", ""),
    ]
    assert decisions_and_reasons(
        checkpoint_moves.plan_copies(source_leases, target_leases, (), counts_owners=False)
    ) == [
        ("same", ""),
        ("same", ""),
    ]


class StoreLosingCreations(MemoryStore):
    """A store that sends no response to the creation of a lease."""

    def write(self, write: Write) -> Outcome:
        """Raise OutcomeUnknown for a creation; apply every other write."""
        if isinstance(write, CreateLease):
            raise OutcomeUnknown(f"no answer about {write.lease.key}")
        return super().write(write)


def test_an_unknown_outcome_is_not_reported_as_a_rejection() -> None:
    """The error tells the user that the write may have been applied."""
    (move,) = checkpoint_moves.plan_copies(leases(AT_9), (), ())
    with pytest.raises(OutcomeUnknown, match="no answer about 0"):
        checkpoint_moves.copy_lease(StoreLosingCreations(), move)
