"""Checkpoints from one store to another, whatever clouds they are in: never backwards, checked afterwards.

A partition of an event hub has its id for a key in every store, a shard its shard id, so keys are
copied as they are; where a table serves several streams its keys carry a prefix, which can be
taken off or put on.
"""

from collections.abc import Collection, Iterable
from typing import assert_never

from attrs import evolve

from adapters.moves import Move, blank, carried_out
from balancer.model import Lease
from stores.protocol import Outcome, Store


def renamed(leases: Iterable[Lease], off: str, on: str, stream: str | None = None) -> tuple[Lease, ...]:
    """Those whose key begins with `off`, with `on` in its place, in the parents too.

    They are of `stream` then; if none is said, of the one that a changed key names, or of the one they were of.
    """

    def name(key: str) -> str:
        return on + key.removeprefix(off)

    def one(lease: Lease) -> Lease:
        key, shard = name(lease.key), _shard(lease, off)
        named = key.removesuffix(shard).removesuffix(":") if off or on else lease.stream
        parents = tuple(map(name, lease.parents))
        return evolve(lease, key=key, shard=shard, parents=parents, stream=named if stream is None else stream)

    return tuple(one(lease) for lease in leases if lease.key.startswith(off))


def _shard(lease: Lease, off: str) -> str:
    """The source's own id, which no prefix changes; a store without a place for it gives the key."""
    return lease.key.removeprefix(off) if lease.shard == lease.key else lease.shard


def planned(leases: Iterable[Lease], stored: Iterable[Lease], live: Collection[str]) -> tuple[Move, ...]:
    """What copying these into a table with those would do, by key; `live` are the keys nobody may touch."""
    known = {lease.key: lease for lease in stored}
    return tuple(
        _move(blank(lease, lease.checkpoint), known.get(lease.key), live)
        for lease in sorted(leases, key=lambda lease: lease.key)
    )


def _move(lease: Lease, stored: Lease | None, live: Collection[str]) -> Move:
    if stored is None:
        return Move("create", lease, None)
    forward = Move("forward", lease, stored)
    if stored.checkpoint == lease.checkpoint:
        return evolve(forward, do="same")
    if stored.checkpoint.order > lease.checkpoint.order:
        return forward.refused("a later checkpoint is stored there")
    if stored.checkpoint.order == lease.checkpoint.order:
        return forward.refused("another start is stored there")
    if stored.key in live:
        return forward.refused(f"{stored.owner} is working on it")
    return forward


def copied(target: Store, move: Move) -> Move:
    """The move carried out. Raises OutcomeUnknown."""
    return carried_out(move, lambda: _written(target, move))


def _written(target: Store, move: Move) -> Outcome:
    if move.stored is None:
        return target.create(move.lease)
    return target.checkpoint_late(move.stored, move.lease.checkpoint)


def wanting(move: Move) -> bool:
    """Whether there is something to write."""
    match move.do:
        case "create" | "forward" | "back":
            return True
        case "same" | "refuse":
            return False
        case _:
            assert_never(move.do)


def verified(target: Store, moves: Iterable[Move]) -> tuple[Move, ...]:
    """The moves, each checked by a consistent reading: what was written must be there, or something later."""
    moves = tuple(moves)
    now = {lease.key: lease for lease in target.get([move.lease.key for move in moves if wanting(move)])}
    return tuple(_checked(move, now.get(move.lease.key)) if wanting(move) else move for move in moves)


def _checked(move: Move, now: Lease | None) -> Move:
    there = now is not None and now.checkpoint.order >= move.lease.checkpoint.order
    return move if there else move.refused("it was written, and is not there now")
