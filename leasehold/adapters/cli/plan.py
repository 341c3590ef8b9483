"""`leasehold plan`: runs the planner on JSON input, for programs in any language."""

import json
import sys
from typing import Annotated

import typer
from attrs import fields

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.json_form import JSON_NAMES, RULES, BadJsonField, plan_json
from leasehold.stores.fields import FIELDS

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

OPTIONS = "\n".join(f"    {name}: {', '.join(each.name for each in fields(kind))}" for name, kind in RULES.items())

LEASE = "\n".join(
    f"    {JSON_NAMES.get(each.name, each.name)}: {each.meaning}" for each in FIELDS if each.kind != "hash key"
)

EXAMPLE = f"""
One JSON object on standard input, one on standard output. Nothing is read or written besides.

    leasehold plan <<'END'
    {{"leases": [{{"key": "s-0", "owner": "a-1", "idle": 2.5, "version": "17"}},
                {{"key": "s-1", "owner": null, "idle": null, "version": "0"}}],
     "me": {{"worker": "b-1", "turn": 4}},
     "config": {{"rules": "kcl", "lease_seconds": 10}}}}
    END
    {{"actions": [{{"do": "claim", "key": "s-1", "rule": "K5"}}], "look_again_seconds": 20.05}}

`leases`: what one reading of the table showed. `idle` is for how many seconds the version has stood
still; null where the lease was first seen without an owner. `checkpoint` is TRIM_HORIZON, LATEST,
AT_TIMESTAMP, SHARD_END or a decimal string, `sub` its sub-sequence number. All fields of a lease, but for `hash_range`
(first and last hash key, as decimal strings):

{LEASE}

`shards`: the complete listing of the streams (`id`, `parents`, `hash_range`, `open`); left out, no
lease is created or deleted.

`me`: who asks (`worker`), and for which `turn`; the turn is all the chance there is. `history` is what earlier
readings taught: `owners_still` and `fleet_still`, seconds; `full_still`, seconds since the whole table was read,
above 0 where `leases` holds some rows as they were then; `full_apart`, seconds between the last two readings of all,
null before the second; `full_took`, seconds that the last of them took; `holes`; `gaps`, `paces` and `led`, seconds by
worker; `hearing` of bulletins (`latest` with `looks`, `acts` and `warns`; `acts_read`, `acts_still`, `looks_still`,
`warned`, `turned`, `call`).

With `--worker ID` no `me` is needed, and the output of `leasehold leases --json` can be given as it is:

    leasehold leases sqlite:///orders.db --json | leasehold plan --worker b-1

`config`: `rules`, minimal by default; `lease_seconds`, `cycle_seconds`, `renew_seconds`, `initial_position`
(AT_TIMESTAMP with `timestamp_ms`), and the options of the rules:

{OPTIONS}

`dialect` is gist, dotnet, java or python, `mode` balanced or greedy; `groups` is "prefix" or a list of separators,
`expected_workers` a number or a list of names.

When to look again: `look_again_seconds`; `look_again_keys`, the only rows that need be read then (left out: all);
`look_again_stale_ok`, where a reading may be eventually consistent; `look_again_notes`, for the next renewals to carry.

An action's `do` is create, renew, claim, steal (`from`), request-handoff (`from`), release
(`to`) or delete; `rule` is the numbered rule of specs/ that asked for it.

A bad value or an unknown field: exit status 2, and one line on standard error that names the field.
"""


@app.command(help="Answer one listing, as JSON, with the actions of one worker.", epilog=EXAMPLE)
def command(
    indent: Annotated[
        int | None, typer.Option(help="Spread the answer over lines, indented by this much.", min=0)
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(help="Ask as this worker, where the input does not say who asks.", show_default=False),
    ] = None,
) -> None:
    """Read a JSON request from standard input, and print the plan."""
    with ending("plan", misuse=(BadJsonField, OSError)):
        planned = plan_json(sys.stdin.buffer.read(), worker)
    print(json.dumps(planned, indent=indent))
