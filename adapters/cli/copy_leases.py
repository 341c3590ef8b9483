"""`leasehold copy-leases`: move checkpoints between stores and clouds."""

from typing import Annotated

import typer

from adapters.cli.checkpoint_moves import ended, told
from adapters.copying import copied, planned, renamed, verified, wanting
from adapters.moves import STILL_SECONDS, Move, living, readable
from balancer.model import Lease
from stores.protocol import Store, StoreError
from stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
FROM and TO are store URLs: `dynamodb://…`, `azblob://…`, `s3://…`, `sqlite:///…`; FROM may also be
`azblob-eph://account/container?eventhub=namespace/hub`, the blobs of the retired Event Processor Host. Stop
the workers of FROM first, and start those of TO afterwards: what is processed in between is processed twice.

A lease that TO does not have is created, without an owner. One that it has is moved forward, never back: a
later checkpoint stays, is reported as refused, and `leasehold reset` is the way to set it back. A lease of
TO whose owner is alive is refused too. Where a store does not tell how long ago an owner renewed, this takes
`--still-seconds` to find out. Afterwards every lease written is read again and compared. A dry run makes
nothing at all, so TO must be there.

A partition has its id for a key in every store, so a hub's checkpoints can go from DynamoDB to the blobs of
the Azure SDKs and back as they are. (Those blobs want each checkpoint's offset, which any worker here stores.)
Where a table serves several streams, `--strip` and `--add` change the keys' prefix. Leases of a hub name their
namespace, hub and group, and a worker of another refuses them: `--stream namespace/hub/group`, in lower case,
begins a new group where an old one stands.

Exit status: 0 if every checkpoint is in TO, 1 if any was refused or a store failed (run it again: what is
done is not done twice), 2 on bad usage.
"""


@app.command(help="Copy checkpoints from one store to another.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    from_: Annotated[str, typer.Argument(metavar="FROM", help="The store to read, as a URL.", show_default=False)],
    to: Annotated[str, typer.Argument(metavar="TO", help="The store to write, as a URL.", show_default=False)],
    strip: Annotated[str, typer.Option(help="Copy only keys that begin with this, without it.")] = "",
    add: Annotated[str, typer.Option(help="Put this before every key.")] = "",
    stream: Annotated[str | None, typer.Option(help="Say that they are of this stream. [what FROM says]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; show what would be.")] = False,
    still_seconds: Annotated[float, typer.Option(help="An owner silent for this long is gone.", min=0)] = STILL_SECONDS,
    even_if_owned: Annotated[bool, typer.Option("--even-if-owned", help="Also under a living owner.")] = False,
    create: Annotated[bool, typer.Option(help="Make TO's table or container if there is none.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan, write, verify, tell."""
    try:
        source, target = open_store(from_, create=False), open_store(to, create=create and not dry_run)
    except ValueError as error:
        raise ended("copy-leases", error, 2) from None
    except StoreError as error:
        raise ended("copy-leases", error, 1) from None
    still = 0.0 if even_if_owned else still_seconds
    try:
        moves = _planned(target, renamed(readable(source, "FROM"), strip, add, stream), still)
        raise told(moves if dry_run else _carried_out(target, moves), dry_run=dry_run, as_json=as_json)
    except StoreError as error:
        raise ended("copy-leases", error, 1) from None
    finally:
        source.close()
        target.close()


def _planned(target: Store, leases: tuple[Lease, ...], still: float) -> tuple[Move, ...]:
    stored = readable(target, "TO")
    moves = planned(leases, stored, ())
    doubtful = [move.stored for move in moves if wanting(move) and move.stored]
    return planned(leases, stored, living(target, doubtful, still)) if still else moves


def _carried_out(target: Store, moves: tuple[Move, ...]) -> tuple[Move, ...]:
    return verified(target, [copied(target, move) if wanting(move) else move for move in moves])
