"""`leasehold reset`: set checkpoints back or forward."""

from typing import Annotated

import typer

from adapters.cli.checkpoint_moves import ended, told
from adapters.moves import STILL_SECONDS, living, readable
from adapters.resetting import planned, reset
from balancer.model import Lease, Position
from stores.protocol import StoreError
from stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
`--to` is TRIM_HORIZON, LATEST, AT_TIMESTAMP (with `--timestamp-ms`) or a sequence number (with one `--key`;
for an event hub with `--offset` too). Without `--key` every lease is set, those of finished shards included.

A lease whose owner is alive is refused: stop the workers first. Where a store does not tell how long ago an
owner renewed, this takes `--still-seconds` to find out; `--even-if-owned` does not ask, and an owner then
learns at its next renewal that its lease is gone.

A lease that goes forward to a number keeps everything else it says. One that goes back, or to a start, is deleted
and created anew: without an owner, without notes, and without what other programs have noted on it.

Exit status: 0 if every lease stands where it was to be set, 1 if any was refused or the store failed, 2 on
bad usage.
"""


@app.command(help="Set checkpoints back or forward.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    store: Annotated[str, typer.Argument(help="Where the leases are, as a URL.", show_default=False)],
    to: Annotated[str, typer.Option(help="The position to set.", show_default=False)],
    key: Annotated[list[str] | None, typer.Option(help="A lease to set; may be repeated. [all]")] = None,
    timestamp_ms: Annotated[int | None, typer.Option(help="For AT_TIMESTAMP: ms since 1970.", min=0)] = None,
    sub: Annotated[int, typer.Option(help="With a number: its sub-sequence number.", min=0)] = 0,
    offset: Annotated[str, typer.Option(help="With an event hub's number: its offset.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; show what would be.")] = False,
    still_seconds: Annotated[float, typer.Option(help="An owner silent for this long is gone.", min=0)] = STILL_SECONDS,
    even_if_owned: Annotated[bool, typer.Option("--even-if-owned", help="Also under a living owner.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan, write, tell."""
    try:
        position = _position(to, timestamp_ms, sub, offset, keys=len(key or ()))
        opened = open_store(store, create=False)
    except ValueError as error:
        raise ended("reset", error, 2) from None
    except StoreError as error:
        raise ended("reset", error, 1) from None
    try:
        leases = _chosen(readable(opened, "store"), key)
        live = frozenset[str]() if even_if_owned else living(opened, leases, still_seconds)
        moves = planned(leases, position, live)
        done = moves if dry_run else tuple(reset(opened, move, insist=even_if_owned) for move in moves)
        raise told(done, dry_run=dry_run, as_json=as_json)
    except ValueError as error:
        raise ended("reset", error, 2) from None
    except StoreError as error:
        raise ended("reset", error, 1) from None
    finally:
        opened.close()


def _position(to: str, timestamp_ms: int | None, sub: int, offset: str, *, keys: int) -> Position:
    if (to == "AT_TIMESTAMP") != (timestamp_ms is not None):
        raise ValueError("--timestamp-ms: it goes with --to AT_TIMESTAMP, and only with it")
    if to == "SHARD_END":
        raise ValueError("--to: a lease ends when its shard has been read to the end, and not by hand")
    try:
        position = Position(to, timestamp_ms or sub, offset)
    except ValueError:
        raise ValueError(f"--to: {to!r} is not TRIM_HORIZON, LATEST, AT_TIMESTAMP or a sequence number") from None
    if (sub or offset) and not position.numbered:
        raise ValueError("--sub and --offset: they go with a sequence number")
    if position.numbered and keys != 1:
        raise ValueError("--to: a sequence number belongs to one shard; name its lease with --key")
    return position


def _chosen(leases: tuple[Lease, ...], keys: list[str] | None) -> tuple[Lease, ...]:
    known = {lease.key: lease for lease in leases}
    for key in keys or ():
        if key not in known:
            raise ValueError(f"--key: there is no lease {key!r}")
    return tuple(known[key] for key in keys) if keys else leases
