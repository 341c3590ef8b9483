"""How `copy-leases` and `reset` tell what they did: a table for people, or JSON."""

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adapters.moves import Move
from balancer.model import Position

_DONE = {"create": "created", "forward": "moved forward", "back": "set back", "same": "as it was", "refuse": "refused"}
_WOULD = {"create": "create", "forward": "move forward", "back": "set back", "same": "leave", "refuse": "refuse"}


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


def ended(command: str, error: Exception, status: int) -> typer.Exit:
    """One line on standard error, and the exit status."""
    print(f"leasehold {command}: {error}", file=sys.stderr)
    return typer.Exit(status)


def _print(moves: tuple[Move, ...], *, dry_run: bool) -> None:
    table = Table("lease", "is", "wanted", "would" if dry_run else "outcome", title="Dry run" if dry_run else None)
    words = _WOULD if dry_run else _DONE
    for move in moves:
        now = said(move.stored.checkpoint) if move.stored else "-"
        outcome = words[move.do] + (f": {move.why}" if move.why else "")
        table.add_row(*map(escape, (move.lease.key, now, said(move.lease.checkpoint), outcome)))
    Console().print(table)


def said(position: Position) -> str:
    """A position in one word, or two."""
    if position.sequence == "AT_TIMESTAMP":
        return f"AT_TIMESTAMP {datetime.fromtimestamp(position.sub / 1000, UTC).isoformat(timespec='milliseconds')}"
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
