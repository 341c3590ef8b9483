"""`leasehold doctor`: checks rights, conditional writes, clocks, the table and the cost before a fleet starts."""

import json
from typing import Annotated

import typer

from leasehold.adapters.cli.common.asking import AsJson, FleetLeaseSeconds, RuleSetName, Setting
from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.cli.common.times import seconds
from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS
from leasehold.adapters.inputs import configuration_for, settings
from leasehold.adapters.ops.doctor.attempts import well
from leasehold.adapters.ops.doctor.examination import ExaminedFleet, examined
from leasehold.stores.printable import printable

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
Run it where a worker will run, with a worker's credentials. Each right is used once and named as policies name it.

    leasehold doctor 'kinesis://orders?region=eu-central-1' --store 'dynamodb://orders-app?region=eu-central-1'

What it writes: to DynamoDB and SQLite nothing, only writes under conditions that cannot hold (on a row
`leasehold-probe-…` that is never there); to a container or bucket one small object `probe/…` below the prefix, which
it removes (with versioning two old versions stay). `--read-only` tries the rights to read alone. No table, container,
bucket or consumer is made, and no lease is touched. Of each stream one record is read, and not shown; of an event hub
by a receiver without an owner level, which ends no worker's.

Each line is ok, WRONG, or unknown: what could not be tried without consequences. Costs are computed, at list prices
of us-east-1 unless `--write-price` and `--read-price` say yours (US$ for a million writes, reads).

Exit status: 0 if nothing is wrong, 1 if something is, 2 on bad usage.
"""


@app.command(help="Try rights, conditional writes and clocks; say what to expect and what it costs.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    source: Annotated[str, typer.Argument(help="Where records come from, as a URL.", show_default=False)],
    store: Annotated[str, typer.Option(help="Where leases are or will be kept, as a URL.", show_default=False)],
    rules: RuleSetName = "minimal",
    lease_seconds: FleetLeaseSeconds = None,
    set_: Setting = None,
    workers: Annotated[int | None, typer.Option(help="How many there will be. [as many as own leases]", min=1)] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="As of `consume`.", parser=seconds())] = CHECKPOINT_SECONDS,
    write_price: Annotated[float | None, typer.Option(help="US$ for a million writes.", min=0)] = None,
    read_price: Annotated[float | None, typer.Option(help="US$ for a million reads.", min=0)] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Try no right to write.")] = False,
    as_json: AsJson = False,
) -> None:
    """Examine, tell."""
    with ending("doctor"):
        config = configuration_for(source, settings({"rules": rules, "lease_seconds": lease_seconds}, set_ or []))
        fleet = ExaminedFleet(config, workers, checkpoint_seconds, write_price, read_price, read_only)
        examination = examined(source, store, fleet)
    if as_json:
        print(json.dumps(examination.as_json()))
        raise typer.Exit(0 if well(examination.findings) else 1)
    width = max(len(finding.what) for finding in examination.findings)
    for finding in examination.findings:
        state = "WRONG" if finding.state == "wrong" else finding.state
        print(f"{state:7}  {finding.what:{width}}  {printable(finding.says)}")
        if finding.todo:
            print(f"{'':7}  {'':{width}}  -> {printable(finding.todo)}")
    wrong, unknown = (sum(finding.state == state for finding in examination.findings) for state in ("wrong", "unknown"))
    print(f"{len(examination.findings)} findings: {wrong} wrong, {unknown} unknown")
    raise typer.Exit(0 if well(examination.findings) else 1)
