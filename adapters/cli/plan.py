"""`leasehold plan`: the seam as JSON, for any language."""

import json
import sys
from typing import Annotated

import typer

from adapters.json_fields import BadField
from adapters.plan_json import answer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EXAMPLE = """
One JSON object on standard input, one on standard output. Nothing is read or written besides.

    leasehold plan <<'END'
    {"leases": [{"key": "s-0", "owner": "a-1", "idle": 2.5, "version": "17"},
                {"key": "s-1", "owner": null, "idle": null, "version": "0"}],
     "me": {"worker": "b-1", "turn": 4},
     "config": {"rules": "kcl", "lease_seconds": 10}}
    END
    {"actions": [{"do": "claim", "key": "s-1", "rule": "K5"}], "look_again_seconds": 20.05}

`leases`: what one reading of the table showed. `idle` is for how many seconds the version has stood
still; null where the lease was first seen without an owner. `checkpoint` is TRIM_HORIZON, LATEST,
AT_TIMESTAMP, SHARD_END or a decimal string, `sub` its sub-sequence number.

`shards`: the complete listing of the streams (`id`, `parents`, `hash_range`, `open`); left out, no
lease is created or deleted.

`me`: who asks, and for which turn; the turn is all the chance there is.

`config`: `rules` is minimal (the default), kcl, kcl-rust or event-hubs; `lease_seconds`,
`cycle_seconds`, `renew_seconds`, `initial_position` (AT_TIMESTAMP with `timestamp_ms`), and the
options of the rules. kcl: max_leases, max_steals, very_old_multiplier. kcl-rust: leases_to_acquire,
max_leases. event-hubs: dialect (gist, dotnet, java, python), mode (balanced, greedy). minimal: groups
("prefix" or a list of separators), expected_workers (a number or a list of names), max_leases,
max_steals, patience, grace_seconds, release.

An action's `do` is create, renew, claim, steal (`from`), request-handoff (`from`), withdraw, release
(`to`) or delete; `rule` is the numbered rule of specs/ that asked for it.

A bad value or an unknown field: exit status 2, and one line on standard error that names the field.
"""


@app.command(help="Answer one listing, as JSON, with the actions of one worker.", epilog=EXAMPLE)
def command(
    indent: Annotated[
        int | None, typer.Option(help="Spread the answer over lines, indented by this much.", min=0)
    ] = None,
) -> None:
    """Read one question, print one answer."""
    try:
        planned = answer(sys.stdin.buffer.read())
    except BadField as error:
        print(f"leasehold plan: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(json.dumps(planned, indent=indent))
