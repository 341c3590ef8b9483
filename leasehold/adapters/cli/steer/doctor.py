"""`leasehold doctor`: checks a source and a store before a fleet starts, and estimates the cost."""

import json
from typing import Annotated, Unpack

import typer

from leasehold.adapters.cli.common.asking import AsJson, make_fleet_config
from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.ops.doctor.attempts import has_no_wrong_finding
from leasehold.adapters.ops.doctor.examination import ExaminedFleet, examine
from leasehold.adapters.options import Options, options_by_name
from leasehold.stores.printable import printable

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
Run it on a worker's machine, with a worker's credentials. Each right is used once; it has the name that policies use.

    leasehold doctor 'kinesis://orders?region=eu-central-1' --store 'dynamodb://orders-app?region=eu-central-1'

In DynamoDB and SQLite it changes nothing: it only tries writes under conditions that cannot hold (on a row
`leasehold-probe-…` that does not exist). In a container or bucket it writes one small object `probe/…` below the
prefix, and removes it (with versioning, two old versions stay). `--read-only` tries only the rights to read. No table,
container, bucket or consumer is created, and no lease is changed. It reads one record of each stream and does not show
it; from an event hub it reads with a receiver without an owner level, which does not disconnect a worker.

Each line is ok, WRONG, or unknown, if the check could not be made without consequences. Costs are computed with list
prices of us-east-1, unless you pass `--write-price` and `--read-price` (US$ for a million writes and reads).

Exit status: 0 if nothing is wrong, 1 if something is, 2 on bad usage.
"""


@app.command(help="Check rights, conditional writes and clocks, and estimate costs.", epilog=EPILOG)
@add_table_options("rules", "lease_seconds", "set", "checkpoint_seconds")
def command(  # noqa: PLR0917  one for each option
    source: Annotated[str, typer.Argument(help="Read this stream, a URL.", show_default=False)],
    store: Annotated[str, typer.Option(help="Keep the leases here, a URL.", show_default=False)],
    workers: Annotated[
        int | None, typer.Option(help="Compute costs for this many workers. [as many as own leases]", min=1)
    ] = None,
    write_price: Annotated[
        float | None, typer.Option(help="Compute costs with this price of a million writes, in US$.", min=0)
    ] = None,
    read_price: Annotated[
        float | None, typer.Option(help="Compute costs with this price of a million reads, in US$.", min=0)
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not try rights to write.")] = False,
    as_json: AsJson = False,
    **options: Unpack[Options],
) -> None:
    """Examine the source and the store, and print the findings."""
    with exit_on_failure("doctor"):
        checkpoint_seconds = options_by_name(Options)["checkpoint_seconds"].parse_and_check(
            options["checkpoint_seconds"], "--checkpoint-seconds"
        )
        fleet = ExaminedFleet(
            make_fleet_config(options, source), workers, checkpoint_seconds, write_price, read_price, read_only
        )
        examination = examine(source, store, fleet)
    if as_json:
        print(json.dumps(examination.as_json()))
        raise typer.Exit(0 if has_no_wrong_finding(examination.findings) else 1)
    what_width = max(len(finding.what) for finding in examination.findings)
    for finding in examination.findings:
        shown_state = "WRONG" if finding.state == "wrong" else finding.state
        print(f"{shown_state:7}  {finding.what:{what_width}}  {printable(finding.says)}")
        if finding.todo:
            print(f"{'':7}  {'':{what_width}}  -> {printable(finding.todo)}")
    wrong_count, unknown_count = (
        sum(finding.state == state for finding in examination.findings) for state in ("wrong", "unknown")
    )
    print(f"{len(examination.findings)} findings: {wrong_count} wrong, {unknown_count} unknown")
    raise typer.Exit(0 if has_no_wrong_finding(examination.findings) else 1)
