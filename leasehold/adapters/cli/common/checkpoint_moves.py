"""How `copy-leases` and `reset` tell what they did: a table for people, or JSON."""

import json
from collections.abc import Iterable
from typing import Any

import typer

from leasehold.adapters.cli.common.columns import Cells, Column, show
from leasehold.adapters.cli.common.times import said_moment
from leasehold.adapters.steering.checkpoints.moves import Move
from leasehold.balancer.model import Position

_DONE = {
    "create": "created",
    "forward": "moved forward",
    "back": "set back",
    "raise": "as it was, its fencing number raised",
    "same": "as it was",
    "refuse": "refused",
}
_WOULD = {
    "create": "create",
    "forward": "move forward",
    "back": "set back",
    "raise": "raise its fencing number",
    "same": "leave",
    "refuse": "refuse",
}


def told(moves: Iterable[Move], *, dry_run: bool, as_json: bool) -> typer.Exit:
    """Print every move; the exit status is 1 if any was refused."""
    moves = tuple(moves)
    refused = sum(move.do == "refuse" for move in moves)
    if as_json:
        print(json.dumps({"dry_run": dry_run, "refused": refused, "leases": [_json(move) for move in moves]}))
    elif moves:
        _print(moves, dry_run=dry_run)
    else:
        print("There is no lease to move.")
    return typer.Exit(1 if refused else 0)


def _print(moves: tuple[Move, ...], *, dry_run: bool) -> None:
    words, outcome = (_WOULD, "would") if dry_run else (_DONE, "outcome")
    rows = tuple(
        (
            move.lease.key,
            said(move.stored.checkpoint) if move.stored else "",
            said(move.lease.checkpoint),
            words[move.do] + (f": {move.why}" if move.why else ""),
        )
        for move in moves
    )
    columns = (Column("lease"), Column("is"), Column("wanted"), Column(outcome, words=True))
    show(Cells(columns, rows, title="Dry run" if dry_run else ""))


def said(position: Position) -> str:
    """A position in one word."""
    if position.sequence == "AT_TIMESTAMP":
        return f"AT_TIMESTAMP={said_moment(position.sub)}"
    return f"{position.sequence}.{position.sub}" if position.sub else position.sequence


def _json(move: Move) -> dict[str, Any]:
    return {
        "key": move.lease.key,
        "do": move.do,
        **({"why": move.why} if move.why else {}),
        **({"was": _position(move.stored.checkpoint)} if move.stored else {}),
        "wanted": _position(move.lease.checkpoint),
    }


def _position(position: Position) -> dict[str, Any]:
    return {
        "checkpoint": position.sequence,
        **({"sub": position.sub} if position.sub else {}),
        **({"token": position.token} if position.token else {}),
    }
