"""`leasehold explain`: shows which actions each worker would take now, by which rule, and why a lease has its owner."""

import json
import time
from contextlib import closing
from typing import Annotated, Unpack

import typer

from leasehold.adapters.cli.common.asking import (
    AsJson,
    StoreUrl,
    WatchSeconds,
    make_fleet_config,
    watch_table,
)
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.ops.explaining import plans, rules_of, story
from leasehold.adapters.ops.swapping import open_for_reading
from leasehold.adapters.ops.watching import leases_by_owner
from leasehold.adapters.options import Options
from leasehold.balancer.contradictions import reported_contradictions
from leasehold.errors import StoreError
from leasehold.stores.printable import printable

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
The table is watched for a while, because most stores do not show when a lease was last renewed. Then the plan of each
worker is computed, and every rule in these plans is explained in a sentence. For a lease, its status, its reading
progress and the reason why it stays are shown, too. Pass the settings of the fleet: `--rules`, `--lease-seconds` and
`--set` as its workers have them.

    leasehold explain sqlite:///srv/orders.db
    leasehold explain sqlite:///srv/orders.db --worker w-4        # also for a worker that has not joined yet
    leasehold explain sqlite:///srv/orders.db --lease shardId-000000000003
    leasehold explain sqlite:///srv/orders.db --to postgres://db/orders       # during a swap

A worker of another library (without a signature on its leases) follows rules of its own; it is shown as if it followed
`--rules`. If a rule chooses at random, the worker may choose another lease of the same kind.

Nothing is written. Exit status: 0, 1 if the store failed, 2 on bad usage.
"""


@app.command(help="Explain what each worker would do now, and why a lease has its owner.", epilog=EPILOG)
@add_table_options("to", "rules", "lease_seconds", "set")
def command(
    store: StoreUrl,
    only: Annotated[
        str | None, typer.Option("--worker", help="Show only this worker, which may not have joined yet.")
    ] = None,
    lease: Annotated[str | None, typer.Option(help="Explain the lease with this key.")] = None,
    span: WatchSeconds = None,
    as_json: AsJson = False,
    **options: Unpack[Options],
) -> None:
    """Watch the table, and print the plans of the workers or the explanation of a lease."""
    with exit_on_failure("explain", StoreError):
        if only is not None and lease is not None:
            raise ValueError("--worker and --lease: choose one of them")
        config = make_fleet_config(options)
        with closing(open_for_reading(store, options["to"])) as table_store:
            table = watch_table(table_store, config, span)
        worker_plans = plans(table, config, () if only is None else (only,))
        selected_plans = tuple(worker_plan for worker_plan in worker_plans if only in {None, worker_plan.worker})
        explained_lease = next((row for row in table.leases if row.key == lease), None)
        if lease is not None and explained_lease is None:
            raise ValueError(f"--lease: there is no lease {lease!r}")
    lease_story = None if explained_lease is None else story(table, config, explained_lease, worker_plans)
    problems = (*reported_contradictions(table.leases), *table.swapping)
    if as_json:
        json_document = {"at": round(time.time(), 3), "rules": config.rules.name, "lease_seconds": config.lease_seconds}
        json_document |= {"watched_seconds": round(table.seconds, 3), "malformed": len(table.malformed)}
        json_document |= (
            {"contradictions": list(conflicts)} if (conflicts := reported_contradictions(table.leases)) else {}
        )
        json_document |= {"swap": list(table.swapping)} if table.swapping else {}
        plans_json = {
            "workers": [worker_plan.as_json() for worker_plan in selected_plans],
            "says": dict(rules_of(selected_plans)),
        }
        print(json.dumps(json_document | (plans_json if lease_story is None else lease_story.as_json())))
        return
    if lease_story is not None:
        history_lines = [f"  {line}" for line in (*lease_story.past, *lease_story.reading)]
        lines = [lease_story.lease.key, f"{lease_story.status.word}: {lease_story.status.says}", *history_lines]
        lines += [f"should have it: {lease_story.should}", f"would move: {lease_story.moves}"]
    else:
        free_count = len(leases_by_owner(table.leases).get(None, ()))
        summary_text = (
            f"{len(table.unfinished_leases)} unfinished leases, {free_count} without an owner; rules "
            f"{config.rules.name}"
        )
        lines = [
            f"{summary_text}, lease_seconds {config.lease_seconds:g}; watched for {table.seconds:.0f} s",
            *problems,
        ]
        if not selected_plans:
            lines.append("no worker holds a lease; --worker NAME says what one would do")
        for worker_plan in selected_plans:
            foreign_note = "" if worker_plan.ours else "  (another library's: its own rules may differ)"
            lines.append(f"{worker_plan.worker}  holds {worker_plan.held}, share {worker_plan.share}{foreign_note}")
            lines += [f"  {line}" for line in worker_plan.lines]
        lines += [f"{rule}: {rule_text}" for rule, rule_text in rules_of(selected_plans).items()]
    print(*map(printable, lines), sep="\n")
