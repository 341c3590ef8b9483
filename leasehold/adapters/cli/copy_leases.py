"""`leasehold copy-leases`: copies checkpoints between stores and clouds."""

from contextlib import closing
from typing import Annotated

import typer

from leasehold.adapters.cli.common.asking import AsJson, DryRun, EvenIfOwned, StillSeconds
from leasehold.adapters.cli.common.columns import print_moves
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.ops.checkpoints import (
    STILL_SECONDS,
    copy_lease,
    live_keys_by_table,
    needs_write,
    plan_copies,
    read_leases,
    rename_prefix,
    verify,
)
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store, split_store_url

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
FROM and TO are store URLs: `dynamodb://…`, `azblob://…`, `s3://…`, `gcs://…`, `postgres://…`, `sqlite:///…`. Stop the
workers of FROM first, and start those of TO afterwards; otherwise records in between are processed twice. While an
owner of a lease in FROM is alive, nothing is copied, unless `--even-if-read` is given.

A lease that TO does not have is created without an owner. A lease that TO has is moved forward, never back: if its
checkpoint is later, the copy is refused; use `leasehold reset` to set it back. A copy is also refused if the lease's
owner in TO is alive. If a store does not show when an owner last renewed, this takes `--still-seconds`, for both stores
at once. The fencing numbers of handlers in TO continue above those in FROM, except in the blobs of the Azure SDKs,
which have none. Afterwards every written lease is read again and compared. A dry run creates nothing, so TO must exist.

`file:///path.jsonl` is a backup with a line of JSON for each lease. It can be made while the fleet reads; after it is
restored, later records are processed again. The file is complete when the command ends, or is not written at all. In an
existing backup, checkpoints are moved forward, too.

The key of a partition is its id in every store, so a hub's checkpoints can be copied unchanged from DynamoDB to the
blobs of the Azure SDKs and back. (Those blobs need the offset of each checkpoint, which every worker here stores.) If
a table serves several streams, `--strip` and `--add` change the prefix of the keys. Leases of a hub name their
namespace, hub and group, and workers of another group refuse them: `--stream namespace/hub/group`, in lower case,
starts a new group at the checkpoints of an old one.

Exit status: 0 if every checkpoint is in TO; 1 if any copy was refused or a store failed (run it again: finished copies
are not repeated); 2 on bad usage.
"""


@app.command(help="Copy checkpoints from one store to another.", epilog=EPILOG)
def command(  # noqa: PLR0917  one for each option
    from_: Annotated[str, typer.Argument(metavar="FROM", help="Read this store, a URL.", show_default=False)],
    to: Annotated[str, typer.Argument(metavar="TO", help="Write this store, a URL.", show_default=False)],
    strip: Annotated[str, typer.Option(help="Copy only keys with this prefix, and remove it.")] = "",
    add: Annotated[str, typer.Option(help="Add this prefix to every key.")] = "",
    stream: Annotated[str | None, typer.Option(help="Set the stream of the leases. [as in FROM]")] = None,
    dry_run: DryRun = False,
    still_seconds: StillSeconds = STILL_SECONDS,
    even_if_owned: EvenIfOwned = False,
    even_if_read: Annotated[bool, typer.Option("--even-if-read", help="Copy while a fleet reads FROM, too.")] = False,
    create: Annotated[bool, typer.Option(help="Create TO's table or container if there is none.")] = True,
    as_json: AsJson = False,
) -> None:
    """Copy the leases, verify the copies, and print each move."""
    with (
        exit_on_failure("copy-leases", StoreError),
        closing(open_store(from_, create=False, write=False)) as source,
        closing(open_store(to, create=create and not dry_run, write=not dry_run)) as target,
    ):
        selected_leases = tuple(lease for lease in read_leases(source, "FROM") if lease.key.startswith(strip))
        # A backup may be made while a fleet reads. After it is restored, later records are processed again.
        ignores_owners = even_if_read or split_store_url(to)[0] == "file"
        leases, watched_leases = (
            rename_prefix(selected_leases, strip, add, stream),
            () if ignores_owners else selected_leases,
        )
        # In FROM, check for living owners only if at least one lease must be written. In TO, check only the leases that
        # will be overwritten.
        stored_leases, counts_owners = read_leases(target, "TO"), target.capabilities.counts_owners
        moves_to_write = [
            move for move in plan_copies(leases, stored_leases, (), counts_owners=counts_owners) if needs_write(move)
        ]
        leases_to_overwrite = [] if even_if_owned else [move.stored for move in moves_to_write if move.stored]
        live_in_from, live_in_to = live_keys_by_table(
            [(source, watched_leases if moves_to_write else ()), (target, leases_to_overwrite)], still_seconds
        )
        moves = plan_copies(leases, stored_leases, live_in_to, counts_owners=counts_owners)
        live_owners = sorted({lease.owner for lease in watched_leases if lease.key in live_in_from and lease.owner})
        if live_owners:
            refusal_reason = f"FROM is still read by {', '.join(live_owners)}; stop its workers first"
            moves = tuple(move.refused(refusal_reason) if needs_write(move) else move for move in moves)
        if not dry_run:
            written_moves = [
                copy_lease(target, move, insist=even_if_owned) if needs_write(move) else move for move in moves
            ]
            moves = verify(target, written_moves)
        raise print_moves(moves, dry_run=dry_run, as_json=as_json)
