"""`leasehold plan`: runs the planner on JSON input, for programs in any language."""

import json
import sys
from typing import Annotated

import typer
from attrs import fields

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.json_form import JSON_NAMES, RULES, BadJsonField, plan_from_json
from leasehold.stores.fields import FIELDS

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

RULE_OPTIONS = "\n".join(f"    {name}: {', '.join(each.name for each in fields(kind))}" for name, kind in RULES.items())

LEASE_FIELDS = "\n".join(
    f"    {JSON_NAMES.get(each.name, each.name)}: {each.meaning}" for each in FIELDS if each.kind != "hash key"
)

EXAMPLE = f"""
The input is one JSON object on standard input, and the output one on standard output. Nothing else is read or written.

    leasehold plan <<'END'
    {{"leases": [{{"key": "s-0", "owner": "a-1", "idle": 2.5, "version": "17"}},
                {{"key": "s-1", "owner": null, "idle": null, "version": "0"}}],
     "me": {{"worker": "b-1", "turn": 4}},
     "config": {{"rules": "kcl", "lease_seconds": 10}}}}
    END
    {{"actions": [{{"do": "claim", "key": "s-1", "rule": "K5"}}], "look_again_seconds": 20.05}}

`leases`: the rows of one read of the table. `idle` is for how many seconds the version has been unchanged; null if the
lease had no owner when it was first seen. `checkpoint` is TRIM_HORIZON, LATEST, AT_TIMESTAMP, SHARD_END or a decimal
string, and `sub` its sub-sequence number. A lease has these fields, and `hash_range` (its first and last hash key, as
decimal strings):

{LEASE_FIELDS}

`shards`: the complete listing of the streams (`id`, `parents`, `hash_range`, `open`). Without it, no lease is created
or deleted.

`me`: the worker to plan for (`worker`), and its `turn`; random choices depend only on the turn. `history` is the state
from earlier reads of the table: `owners_still` and `fleet_still`, seconds; `full_still`, seconds since the whole table
was read, above 0 if `leases` contains rows of that read; `full_apart`, seconds between the last two reads of the whole
table, null before the second; `full_took`, seconds that the last of them took; `holes`; `gaps`, `paces` and `led`,
seconds by worker; `hearing` of bulletins (`latest` with `looks`, `acts` and `warns`; `acts_read`, `acts_still`,
`looks_still`, `warned`, `turned`, `call`).

With `--worker ID` no `me` is needed, and the output of `leasehold leases --json` can be passed unchanged:

    leasehold leases sqlite:///orders.db --json | leasehold plan --worker b-1

`config`: `rules`, minimal by default; `lease_seconds`, `cycle_seconds`, `renew_seconds`, `initial_position`
(AT_TIMESTAMP with `timestamp_ms`), and the options of the rules:

{RULE_OPTIONS}

`dialect` is gist, dotnet, java or python, `mode` balanced or greedy; `groups` is "prefix" or a list of separators,
`expected_workers` a number or a list of names.

The next read of the table: `look_again_seconds`, when to read; `look_again_keys`, the only rows to read (without it,
all rows); `look_again_stale_ok`, whether the read may be eventually consistent; `look_again_notes`, annotations to
write with the next renewals.

An action's `do` is create, renew, claim, steal (`from`), request-handoff (`from`), release (`to`) or delete; `rule` is
the number of the rule in specs/ that requires it.

After a bad value or an unknown field, the exit status is 2, and one line on standard error names the field.
"""


@app.command(help="Plan the actions of one worker from a listing, as JSON.", epilog=EXAMPLE)
def command(
    indent: Annotated[int | None, typer.Option(help="Indent the JSON by this many spaces.", min=0)] = None,
    worker: Annotated[
        str | None,
        typer.Option(help="Plan for this worker if the input names none.", show_default=False),
    ] = None,
) -> None:
    """Read a JSON request from standard input, and print the plan."""
    with exit_on_failure("plan", misuse=(BadJsonField, OSError)):
        plan_document = plan_from_json(sys.stdin.buffer.read(), worker)
    print(json.dumps(plan_document, indent=indent))
