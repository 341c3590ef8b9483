"""What copying and resetting decide, and what they make of a store that changes meanwhile."""

import pytest
from attrs import evolve

from adapters import copying, resetting
from adapters.moves import Move, blank, living
from balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Lease, Position, at_timestamp
from stores.contract.actors import done, facts, owned, unowned
from stores.memory import MemoryStore
from stores.protocol import Outcome, OutcomeUnknown

AT_9, AT_10 = Position("9", 0, "4520"), Position("10", 0, "4530")


def leases(*checkpoints: Position, owner: str | None = None) -> tuple[Lease, ...]:
    """Leases "0", "1", … processed up to these."""
    return tuple(Lease(str(n), checkpoint=at, owner=owner) for n, at in enumerate(checkpoints))


def decisions(moves: tuple[Move, ...]) -> list[tuple[str, str]]:
    """What each is to come to, and why not."""
    return [(move.do, move.why) for move in moves]


def test_copying_only_ever_moves_forward() -> None:
    """A second run, days later, would set a running fleet back to where its predecessor stopped."""
    source = leases(AT_9, AT_9, AT_10, SHARD_END, LATEST, AT_9, AT_9)
    stored = leases(TRIM_HORIZON, AT_9, AT_9, AT_9, TRIM_HORIZON, AT_10, owner="ann")
    assert decisions(copying.planned(source, stored, {"2"})) == [
        ("forward", ""),
        ("same", ""),
        ("refuse", "ann is working on it"),
        ("forward", ""),
        ("refuse", "another start is stored there"),
        ("refuse", "a later checkpoint is stored there"),
        ("create", ""),
    ]


def test_a_copied_lease_is_whole_and_nobodys() -> None:
    """The new fleet would wait for workers of the old one to expire, or read a child before its parents."""
    lease = Lease(
        "orders:s-1",
        stream="orders",
        shard="s-1",
        parents=("orders:s-0",),
        owner="ann",
        checkpoint=LATEST,
        hash_range=(0, 9),
        weight=2.0,
        heir="bob",
        yields=True,
        epoch=7,
        notes=(("bulletin", "x"), ("latest_ms", "5")),
    )
    whole = evolve(lease, owner=None, heir=None, yields=False, epoch=0, notes=(("latest_ms", "5"),))
    assert blank(lease, LATEST) == whole
    assert blank(lease, AT_9) == evolve(whole, checkpoint=AT_9, notes=())


def test_prefixes_come_off_and_on_in_keys_and_parents() -> None:
    """A lease would name a parent that is not in its table, and be read before it."""
    child = Lease("orders:s-1", stream="orders", shard="s-1", parents=("orders:s-0",))
    other = Lease("bills:s-1")
    plain = Lease("s-1", parents=("s-0",))
    assert copying.renamed((child, other), "orders:", "") == (plain,)
    assert copying.renamed((plain,), "", "orders:") == (child,)


def test_a_hubs_leases_stay_its_own_unless_told() -> None:
    """A new group could not begin where an old one stands, or would by mistake."""
    lease = Lease("3", stream="ns/orders/old")
    assert copying.renamed((lease,), "", "") == (lease,)
    assert copying.renamed((lease,), "", "", "ns/orders/new") == (evolve(lease, stream="ns/orders/new"),)


def test_what_was_written_is_read_again() -> None:
    """A store that answers and forgets would be found out by the first lost record."""
    target = MemoryStore()
    moves = copying.planned(leases(AT_9, AT_9), (), ())
    copying.copied(target, moves[0])
    assert decisions(copying.verified(target, moves)) == [
        ("create", ""),
        ("refuse", "it was written, and is not there now"),
    ]


def test_a_lease_created_meanwhile_is_refused() -> None:
    """The report would say copied where a worker has already begun elsewhere."""
    target = MemoryStore()
    (move,) = copying.planned(leases(AT_9), (), ())
    done(target.create(Lease("0")))
    assert copying.copied(target, move) == move.refused("somebody else wrote it meanwhile")


def test_an_owner_is_alive_if_it_renews_while_we_watch() -> None:
    """A dead fleet's names on every lease would block the way for ever; a living one be robbed."""
    store = MemoryStore()
    rows = [owned(store, key=key) for key in ("alive", "dead", "let-go")] + [unowned(store, key="free")]
    slept: list[float] = []

    def pause(seconds: float) -> None:
        slept.append(seconds)
        done(store.renew(rows[0]))
        done(store.release(rows[2], "ann"))

    assert living(store, rows, 40.0, pause) == {"alive"}
    assert slept == [40.0]


def test_old_and_unowned_leases_need_no_watching() -> None:
    """Every reset of a stopped fleet would wait for most of a minute."""
    still = (Lease("old", owner="ann", idle=41.0), Lease("free"), Lease("done", owner="ann", checkpoint=SHARD_END))
    slept: list[float] = []
    assert living(MemoryStore(), still, 40.0, slept.append) == frozenset()
    assert slept == []


def test_resetting_goes_either_way() -> None:
    """Back needs another write than forward, and a start is neither."""
    stored = leases(TRIM_HORIZON, AT_9, AT_10, SHARD_END, LATEST, owner="ann")
    assert decisions(resetting.planned(stored, AT_10, {"4"})) == [
        ("forward", ""),
        ("forward", ""),
        ("same", ""),
        ("back", ""),
        ("refuse", "ann is working on it"),
    ]


@pytest.mark.parametrize("position", [TRIM_HORIZON, LATEST, at_timestamp(5), Position("7", 2), Position("12")])
def test_a_reset_lease_stands_where_it_was_set(position: Position) -> None:
    """Neither a later checkpoint nor the end may hold on to it."""
    for before in (TRIM_HORIZON, LATEST, Position("9"), SHARD_END):
        store = MemoryStore()
        stored = unowned(store, "0", before)
        (move,) = resetting.planned((stored,), position, ())
        assert resetting.reset(store, move) == move
        assert facts(store.get(["0"])[0]) == Lease("0", checkpoint=position)


def test_a_reset_yields_to_an_owner_that_woke_up_unless_told() -> None:
    """A worker believed dead would find its lease gone in the middle of a batch."""
    store = MemoryStore()
    seen = owned(store, key="0", at=AT_9)
    (move,) = resetting.planned((seen,), TRIM_HORIZON, ())
    done(store.renew(seen))
    assert resetting.reset(store, move).why == "somebody else wrote it meanwhile"
    assert store.get(["0"])[0].owner == "ann"
    assert resetting.reset(store, move, insist=True) == move
    assert facts(store.get(["0"])[0]) == Lease("0")


class Forgetful(MemoryStore):
    """Never answers a creation."""

    def create(self, lease: Lease) -> Outcome:
        """Lost on the way."""
        raise OutcomeUnknown(f"no answer about {lease.key}")


def test_a_lease_deleted_and_not_created_again_is_told_in_full() -> None:
    """Its parents and hash range would be gone with the last place that knew them."""
    store = Forgetful()
    seen = done(MemoryStore.create(store, Lease("0", checkpoint=AT_9, hash_range=(0, 9))))
    (move,) = resetting.planned((seen,), TRIM_HORIZON, ())
    with pytest.raises(OutcomeUnknown, match=r"deleted, and perhaps not created again .*hash_range=\(0, 9\)"):
        resetting.reset(store, move)


def test_an_unknown_outcome_is_not_a_refusal() -> None:
    """The user would be told that nothing was written where something may have been."""
    (move,) = copying.planned(leases(AT_9), (), ())
    with pytest.raises(OutcomeUnknown, match="no answer about 0"):
        copying.copied(Forgetful(), move)
