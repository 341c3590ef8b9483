"""`leasehold copy-leases`: copies checkpoints between stores and clouds."""

from contextlib import closing
from typing import Annotated

import typer

from leasehold.adapters.cli.common.asking import AsJson, DryRun, EvenIfOwned, StillSeconds
from leasehold.adapters.cli.common.columns import print_moves
from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.ops.checkpoints import (
    STILL_SECONDS,
    copy_lease,
    live_keys_of_each,
    needs_write,
    planned_copies,
    read_leases,
    rename_prefix,
    verify,
)
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store, store_address

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
FROM and TO are store URLs: `dynamodb://…`, `azblob://…`, `s3://…`, `gcs://…`, `postgres://…`, `sqlite:///…`. Stop the
workers of FROM first, and start those of TO afterwards: what is processed in between is processed twice.
While an owner of a lease of FROM is alive nothing is copied, unless `--even-if-read` says so.

A lease that TO does not have is created, without an owner. One that it has is moved forward, never back: a
later checkpoint stays, is reported as refused, and `leasehold reset` is the way to set it back. A lease of
TO whose owner is alive is refused too. Where a store does not tell how long ago an owner renewed, this takes
`--still-seconds` to find out, for both stores at once. The fencing number that handlers are given goes on in TO
above the one in FROM, except in the blobs of the Azure SDKs, which have none. Afterwards every lease written
is read again and compared. A dry run makes nothing at all, so TO must be there.

`file:///path.jsonl` is a backup, a line of JSON for each lease, and may be made while the fleet reads: whoever restores
it reads again what was done since. It is in its place when the command ends, or not at all. A backup that is there
already is moved forward, too.

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
    from_: Annotated[str, typer.Argument(metavar="FROM", help="Read this store, a URL.", show_default=False)],
    to: Annotated[str, typer.Argument(metavar="TO", help="Write this store, a URL.", show_default=False)],
    strip: Annotated[str, typer.Option(help="Copy only keys that begin with this, without it.")] = "",
    add: Annotated[str, typer.Option(help="Put this before every key.")] = "",
    stream: Annotated[str | None, typer.Option(help="Say that they are of this stream. [what FROM says]")] = None,
    dry_run: DryRun = False,
    still_seconds: StillSeconds = STILL_SECONDS,
    even_if_owned: EvenIfOwned = False,
    even_if_read: Annotated[bool, typer.Option("--even-if-read", help="Copy while a fleet reads FROM, too.")] = False,
    create: Annotated[bool, typer.Option(help="Make TO's table or container if there is none.")] = True,
    as_json: AsJson = False,
) -> None:
    """Copy the leases, verify the copies, and print each move."""
    with (
        ending("copy-leases", StoreError),
        closing(open_store(from_, create=False, write=False)) as source,
        closing(open_store(to, create=create and not dry_run, write=not dry_run)) as target,
    ):
        chosen = tuple(lease for lease in read_leases(source, "FROM") if lease.key.startswith(strip))
        # A backup may be made while a fleet reads. After it is restored, later records are processed again.
        owners_ignored = even_if_read or store_address(to)[0] == "file"
        leases, watched_leases = rename_prefix(chosen, strip, add, stream), () if owners_ignored else chosen
        # Watch the owners in FROM only if there is a lease to write, and in TO only the owners of leases to write.
        stored, counts = read_leases(target, "TO"), target.capabilities.counts_owners
        to_write = [move for move in planned_copies(leases, stored, (), counts=counts) if needs_write(move)]
        targets = [] if even_if_owned else [move.stored for move in to_write if move.stored]
        live_in_from, live_in_to = live_keys_of_each(
            [(source, watched_leases if to_write else ()), (target, targets)], still_seconds
        )
        moves = planned_copies(leases, stored, live_in_to, counts=counts)
        owners = sorted({lease.owner for lease in watched_leases if lease.key in live_in_from and lease.owner})
        if owners:
            why = f"FROM is still read by {', '.join(owners)}; stop its workers first"
            moves = tuple(move.refused(why) if needs_write(move) else move for move in moves)
        if not dry_run:
            written = [copy_lease(target, move, insist=even_if_owned) if needs_write(move) else move for move in moves]
            moves = verify(target, written)
        raise print_moves(moves, dry_run=dry_run, as_json=as_json)
