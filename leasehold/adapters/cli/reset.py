"""`leasehold reset`: sets checkpoints back or forward.

The command can also carry out a plan, which is the output of `leasehold reset --dry-run --json`. The plan is first
checked against the table.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path
from time import time
from typing import Annotated

import typer
from attrs import frozen

from leasehold.adapters.cli.common.asking import AsJson, DryRun, EvenIfOwned, StillSeconds, StoreUrl
from leasehold.adapters.cli.common.columns import format_position, print_moves
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.inputs import check_time_ms, find_named_position, parse_initial_position, parse_shift_seconds
from leasehold.adapters.json_form import BadJsonField, JsonValue, parse_json_document, parse_lease
from leasehold.adapters.ops.checkpoints import STILL_SECONDS, Move, live_keys, plan_resets, read_leases, reset
from leasehold.adapters.worker.progress import progress_of
from leasehold.balancer.model import SHARD_END, Lease, Position, at_timestamp
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store


@frozen
class PlannedReset:
    """A lease in a plan, with its checkpoint at the time of the plan and the checkpoint to set."""

    key: str
    was: Position
    wanted: Position


def parse_resets(text: bytes) -> tuple[PlannedReset, ...]:
    """Return the leases in a plan. Raises ValueError, naming the field that is not valid."""
    resets = []
    try:
        for value in parse_json_document(text).fields().take_required_field("leases").items():
            fields = value.fields()
            resets.append(
                PlannedReset(
                    fields.take_required_field("key").parse_name(),
                    _parse_position(fields.take_required_field("was")),
                    _parse_position(fields.take_required_field("wanted")),
                )
            )
    except BadJsonField as error:
        raise ValueError(f"--plan: {error}") from None
    if duplicates := sorted(
        key for key, count in Counter(planned_reset.key for planned_reset in resets).items() if count > 1
    ):
        raise ValueError(f"--plan: lease {duplicates[0]!r} is given twice")
    return tuple(resets)


def plan_moves_from_resets(
    plan: Iterable[PlannedReset], leases: Iterable[Lease], keys_with_live_owner: Collection[str]
) -> tuple[Move, ...]:
    """Return the moves of a plan. A move is refused if the lease's checkpoint has changed since the plan was made.

    Raises:
        ValueError: A lease does not exist.
    """
    leases_by_key = {lease.key: lease for lease in leases}
    moves: list[Move] = []
    for planned_reset in plan:
        if planned_reset.key not in leases_by_key:
            raise ValueError(f"--plan: there is no lease {planned_reset.key!r}; is it the plan of another store?")
        (move,) = plan_resets((leases_by_key[planned_reset.key],), planned_reset.wanted, keys_with_live_owner)
        current_checkpoint = leases_by_key[planned_reset.key].checkpoint
        refusal_reason = (
            f"its checkpoint is {format_position(current_checkpoint)}, "
            f"no longer {format_position(planned_reset.was)}; make a new plan"
        )
        moves.append(
            move if current_checkpoint in {planned_reset.was, planned_reset.wanted} else move.refused(refusal_reason)
        )
    return tuple(moves)


def _parse_position(value: JsonValue) -> Position:
    """Parse a position, which has the same fields as the checkpoint of a lease."""
    value.fields().take_required_field("checkpoint")
    return parse_lease(JsonValue(value.path, {"key": "-", **value.raw_value})).checkpoint


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
`--to` is TRIM_HORIZON, LATEST, a time (`2026-11-22T06:00Z`, in UTC if it has no zone; `now-2h`; AT_TIMESTAMP with
`--timestamp-ms`) or a sequence number (with one `--key`; for an event hub with `--offset` too). Without `--key` every
lease is set, including those of finished shards.

`--shift-by -15m` moves each lease by that much from its current time, which is the arrival time of the last processed
record (in the rows of our workers), or the time in the checkpoint. Finished leases are not changed.

`--plan FILE` carries out the output of `--dry-run --json`; `-` is standard input. Each lease is set to the position in
the plan, and refused if it has moved since the plan was made.

    leasehold reset STORE --to now-2h --dry-run --json > plan.json
    leasehold reset STORE --plan plan.json

A reset is refused if the lease's owner is alive: stop the workers first. If a store does not show when an owner last
renewed, this takes `--still-seconds`. With `--even-if-owned` owners are not checked; an owner then loses its lease, and
notices this at its next renewal.

If a lease moves forward to a number, only its checkpoint changes. If it moves back, or to a start position, it loses
its owner, and its fencing number grows. The lease exists at all times: if this command is interrupted, each lease has
its old or its new checkpoint, and running the command again does the rest.

Exit status: 0 if every lease was set; 1 if any was refused or the store failed; 2 on bad usage.
"""


@app.command(help="Set checkpoints back or forward.", epilog=EPILOG)
def command(  # noqa: PLR0917  one for each option
    store: StoreUrl,
    to: Annotated[str | None, typer.Option(help="Set this position or time.", show_default=False)] = None,
    shift_by: Annotated[str | None, typer.Option(help="Move each by this time: -15m, +1h.")] = None,
    plan: Annotated[
        str | None, typer.Option(help="Carry out this file, which --dry-run --json wrote.", show_default=False)
    ] = None,
    key: Annotated[list[str] | None, typer.Option(help="Set this lease; may be repeated. [all]")] = None,
    timestamp_ms: Annotated[
        int | None, typer.Option(help="Set this time with AT_TIMESTAMP: ms since 1970.", min=0)
    ] = None,
    sub: Annotated[int, typer.Option(help="Set this sub-sequence number, with a sequence number.", min=0)] = 0,
    offset: Annotated[str, typer.Option(help="Set this offset, with an event hub's number.")] = "",
    dry_run: DryRun = False,
    still_seconds: StillSeconds = STILL_SECONDS,
    even_if_owned: EvenIfOwned = False,
    as_json: AsJson = False,
) -> None:
    """Set the checkpoints, and print each move."""
    with exit_on_failure("reset", StoreError):
        if [to, shift_by, plan].count(None) != 2:  # noqa: PLR2004  all but one
            raise ValueError("--to, --shift-by and --plan: give one of them")
        if plan is not None and key:
            raise ValueError("--key: a plan already names its leases")
        # Check all options before opening the store.
        position = (
            None if to is None else _position_from_options(to, timestamp_ms, sub, offset, key_count=len(key or ()))
        )
        shift_seconds = 0.0 if shift_by is None else parse_shift_seconds(shift_by)
        planned_reset_list: tuple[PlannedReset, ...] = ()
        if plan is not None:
            try:
                planned_reset_list = parse_resets(sys.stdin.buffer.read() if plan == "-" else Path(plan).read_bytes())
            except OSError as error:
                raise ValueError(f"--plan: {error}") from None
            for planned_reset in planned_reset_list:
                _reject_position(planned_reset.wanted, f"--plan: lease {planned_reset.key!r}")
        with closing(open_store(store, create=False, write=not dry_run)) as open_table:
            leases = read_leases(open_table, "store")
            leases_by_key = {lease.key: lease for lease in leases}
            for name in key or ():
                if name not in leases_by_key:
                    raise ValueError(f"--key: there is no lease {name!r}")
            leases = tuple(leases_by_key[name] for name in key) if key else leases
            keys_with_live_owner = frozenset[str]() if even_if_owned else live_keys(open_table, leases, still_seconds)
            if position is not None:
                moves = plan_resets(leases, position, keys_with_live_owner)
            elif plan is not None:
                moves = plan_moves_from_resets(planned_reset_list, leases, keys_with_live_owner)
            else:
                moves = _plan_shifted_moves(leases, shift_seconds, keys_with_live_owner)
            results = moves if dry_run else tuple(reset(open_table, move, insist=even_if_owned) for move in moves)
            raise print_moves(results, dry_run=dry_run, as_json=as_json)


def _position_from_options(
    position_text: str, timestamp_ms: int | None, sub_sequence_number: int, offset: str, *, key_count: int
) -> Position:
    if (find_named_position(position_text) == "AT_TIMESTAMP") != (timestamp_ms is not None):
        raise ValueError("--timestamp-ms: give it with --to AT_TIMESTAMP, and only then")
    if position_text.isascii() and position_text.isdigit():
        position = Position(position_text, sub_sequence_number, offset)
    elif timestamp_ms is not None:
        position = at_timestamp(check_time_ms(timestamp_ms, "--timestamp-ms"))
    else:
        position = (
            SHARD_END
            if find_named_position(position_text) == "SHARD_END"
            else parse_initial_position(position_text, time(), "--to")
        )
    _reject_position(position, "--to" if timestamp_ms is None else "--timestamp-ms")
    if (sub_sequence_number or offset) and not position.numbered:
        raise ValueError("--sub and --offset: they go with a sequence number")
    if position.numbered and key_count != 1:
        raise ValueError("--to: a sequence number belongs to one shard; name its lease with --key")
    return position


def _reject_position(position: Position, field: str) -> None:
    """Raise ValueError if the position is in the future, or if it is SHARD_END. No lease may be set to these."""
    if position.sequence == "AT_TIMESTAMP" and position.sub > time() * 1000:
        raise ValueError(f"{field}: it lies in the future")
    if position.ended:
        raise ValueError(f"{field}: a lease ends only when its shard has been read to the end")


def _plan_shifted_moves(
    leases: tuple[Lease, ...], shift_seconds: float, keys_with_live_owner: frozenset[str]
) -> tuple[Move, ...]:
    """Return the moves that set each unfinished lease to the time of its checkpoint plus this many seconds."""
    now = time()
    moves: list[Move] = []
    for lease in leases:
        if lease.ended:
            continue
        # Shift the arrival time of the last processed record, or the checkpoint itself if it is a time.
        progress = progress_of(lease) if lease.checkpoint.numbered else None
        checkpoint_seconds = None if progress is None else progress.arrived
        if lease.checkpoint.sequence == "AT_TIMESTAMP":
            checkpoint_seconds = lease.checkpoint.sub / 1000
        if checkpoint_seconds is None:
            raise ValueError(
                f"--shift-by: the row of lease {lease.key!r} does not contain the time of its checkpoint; "
                "set a time with --to, or name other leases with --key"
            )
        moves += plan_resets(
            (lease,), at_timestamp(round(min(now, checkpoint_seconds + shift_seconds) * 1000)), keys_with_live_owner
        )
    return tuple(moves)
