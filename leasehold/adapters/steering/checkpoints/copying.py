"""Copies checkpoints from one store to another, in any clouds: never backwards, and checked afterwards.

The fencing number goes with them: a lease's next owner in the new store counts on above every number that its
handlers have seen in the old one. (A layout that does not count owners has no number to go on from.)

A partition of an event hub has its id for a key in every store, a shard its shard id, so keys are
copied as they are; where a table serves several streams its keys carry a prefix, which can be
taken off or put on.
"""

from collections.abc import Collection, Iterable
from typing import assert_never

from attrs import evolve

from leasehold.adapters.steering.checkpoints.moves import Move, blank, carried_out, placed
from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Outcome, Store
from leasehold.stores.writes import CheckpointLate, CreateLease

ME = "leasehold copy-leases"


def renamed(leases: Iterable[Lease], off: str, on: str, stream: str | None = None) -> tuple[Lease, ...]:
    """The leases whose key begins with `off`, with `on` in its place, in the parents too.

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


def planned(
    leases: Iterable[Lease], stored: Iterable[Lease], live: Collection[str], *, counts: bool = True
) -> tuple[Move, ...]:
    """The moves that would copy `leases` into a table that has `stored`, by key; `live` keys are not touched.

    counts  whether the table that is written to counts owners
    """
    known = {lease.key: lease for lease in stored}
    return tuple(
        _move(blank(lease, lease.checkpoint), known.get(lease.key), live, counts=counts)
        for lease in sorted(leases, key=lambda lease: lease.key)
    )


def _move(lease: Lease, stored: Lease | None, live: Collection[str], *, counts: bool) -> Move:
    if stored is None:
        return Move("create", lease, None)
    forward = Move("forward", lease, stored)
    if stored.checkpoint == lease.checkpoint:
        # Nobody reads a finished lease again.
        if stored.ended or not (counts and _behind(stored, lease)):
            return evolve(forward, do="same")
        forward = evolve(forward, do="raise")
    elif stored.checkpoint.order > lease.checkpoint.order:
        return forward.refused("a later checkpoint is stored there")
    elif stored.checkpoint.order == lease.checkpoint.order:
        return forward.refused("another start is stored there")
    if stored.key in live:
        return forward.refused(f"{stored.owner} is working on it")
    return forward


def _behind(stored: Lease, lease: Lease) -> bool:
    """Whether its next owner would be given a number that a handler has seen already."""
    return stored.epoch < lease.epoch


def copied(target: Store, move: Move, *, insist: bool = False) -> Move:
    """The move carried out; with `insist` also under an owner that renews. Raises OutcomeUnknown."""
    return carried_out(move, lambda: _written(target, move, insist=insist))


def _written(target: Store, move: Move, *, insist: bool) -> Outcome:
    if move.stored is None:
        return target.write(CreateLease(move.lease))
    if target.promises.counts_owners and _behind(move.stored, move.lease):
        return placed(target, move.stored, move.lease, ME, insist=insist)
    return target.write(CheckpointLate(move.stored, move.lease.checkpoint))


def wanting(move: Move) -> bool:
    """Whether there is something to write."""
    match move.do:
        case "create" | "forward" | "back" | "raise":
            return True
        case "same" | "refuse":
            return False
        case _:
            assert_never(move.do)


def verified(target: Store, moves: Iterable[Move]) -> tuple[Move, ...]:
    """The moves, each checked by a consistent reading: what was written must be there, or something later."""
    moves = tuple(moves)
    counts = target.promises.counts_owners
    now = {lease.key: lease for lease in target.get([move.lease.key for move in moves if wanting(move)])}
    return tuple(_checked(move, now.get(move.lease.key), counts=counts) if wanting(move) else move for move in moves)


def _checked(move: Move, now: Lease | None, *, counts: bool) -> Move:
    there = now is not None and now.checkpoint.order >= move.lease.checkpoint.order
    above = now is not None and not (counts and _behind(now, move.lease))
    return move if there and above else move.refused("it was written, and is not there now")
